"""Peak against time, and the tables of benchmarks: every mark where its file says, whatever else is in the file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from memopt.cli.main import run as run_memopt
from memopt.errors import BadFile
from memopt.outcome import Outcome
from memopt.reports import benchmarks, tradeoff
from memopt.reports.formats.export import exported
from memopt.reports.inputs import load_any, read_inputs
from memopt.reports.page.html import page
from tests.cli.test_show import OUTCOME, toy_plan

ROOT = Path(__file__).parents[2]
LINES = [
    {"job": "tier host", "seconds": 1.5},
    {
        "job": "headline gpt2",
        "plain": {"allocated": 4000, "reserved": 5000, "step_ms": 10.0, "same_losses": True},
        "50%": {"allocated": 2000, "step_ms": [11.0, 13.0, 90.0], "outcome": {"predicted_peak_bytes": 1900}},
        "30%": {"refused": "Traceback\n  File x\nmemopt: budget cannot be met"},
    },
    {"job": "run mlp", "plain": 3000, "predicted": 1200, "measured": 1300, "budget": 1500, "same": True},
    {"job": "=evil</script>", "failed": "<img src=x>"},
]
CURVE = {
    "schema": "memopt.pareto/1", "kind": "pareto", "unplanned_peak_bytes": 9000,
    "points": [
        {"budget_bytes": 8000, "feasible": True, "predicted_peak_bytes": 7900, "predicted_step_ms": 11.0, "overhead": 0.1},
        {"budget_bytes": 100, "feasible": False, "predicted_peak_bytes": 500, "predicted_step_ms": None, "overhead": None},
    ],
}  # fmt: skip
COMPARED = {
    "kind": "plan", "schema": "memopt.plan/1", "budget_bytes": 7000, "unplanned_peak_bytes": 9000, "plain_step_ms": 100.0,
    "strategies": [
        {"strategy": "auto", "feasible": True, "predicted_peak_bytes": 6900, "predicted_step_ms": 110.0},
        {"strategy": "<b>", "feasible": True, "predicted_peak_bytes": 6000, "predicted_step_ms": 150.0},
        {"strategy": "vdnn", "feasible": False, "predicted_peak_bytes": None, "predicted_step_ms": None},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, LINES)) + "\n")
    (tmp_path / "curve.json").write_text(json.dumps(CURVE))
    (tmp_path / "compared.json").write_text(json.dumps(COMPARED))
    toy_plan().save(tmp_path / "plan.json")
    msgspec.convert(OUTCOME, Outcome).save(tmp_path / "outcome.json")
    return tmp_path


def test_a_row_a_case(folder: Path) -> None:
    frame = benchmarks.table(read_inputs([folder / "bench.jsonl"]).benchmarks[0][1])
    assert frame[["job", "case"]].to_numpy().tolist() == [
        ["tier host", ""], ["headline gpt2", "plain"], ["headline gpt2", "50%"], ["headline gpt2", "30%"], ["run mlp", ""],
        ["=evil</script>", ""],
    ]  # fmt: skip
    assert frame.loc[2, ["predicted_bytes", "peak_bytes", "step_ms"]].tolist() == [1900, 2000, 13]
    assert frame.loc[4, ["plain_bytes", "predicted_bytes", "peak_bytes"]].tolist() == [3000, 1200, 1300]
    assert frame.result.tolist() == [
        "1.5 s", "same losses", "", "memopt: budget cannot be met", "same output", "<img src=x>",
    ]  # fmt: skip


def test_what_a_campaign_on_a_gpu_wrote_is_shown() -> None:
    for path in sorted((ROOT / "benchmarks" / "gpu" / "data").glob("*.jsonl")):
        inputs = read_inputs([path])
        jobs = [json.loads(line) for line in path.read_text().splitlines()]
        frame = benchmarks.table(inputs.benchmarks[0][1])
        assert set(frame.job) == {job["job"] for job in jobs}
        assert frame.peak_bytes.notna().sum() > 3
        assert (tradeoff.of_benchmark(frame) is not None) == frame.step_ms.notna().any()
        assert page(inputs, [path.name]).startswith("<!doctype html>")


def test_every_plan_of_the_files_is_a_mark(folder: Path) -> None:
    names = ("plan.json", "outcome.json", "curve.json", "compared.json")
    marks = tradeoff.marks_of(read_inputs([folder / name for name in names]))
    told = {(mark.kind, mark.peak_bytes): mark.added for mark in marks}
    plan = toy_plan()
    assert told[("plan for a budget", 7900)] == 0.1
    assert told[("strategy", 6900)] == pytest.approx(0.1)
    assert told[("strategy", 6000)] == pytest.approx(0.5)
    assert told[("chosen", plan.predicted_peak_bytes)] == plan.predicted_step_ms / plan.plain_step_ms - 1
    assert ("measured", OUTCOME["measured_peak_bytes"]) in told
    assert told[("as it is", 9000)] == 0
    figure = tradeoff.drawn(marks, 7000)
    assert sum(len(trace.x) for trace in figure.data) == len(marks)


@pytest.mark.parametrize("form", ["html", "json", "markdown", "csv"])
def test_every_form_shows_a_benchmark_and_nothing_that_could_run(folder: Path, form: str) -> None:
    data = exported(read_inputs([folder / "bench.jsonl"]), ["bench.jsonl"], form)
    assert data == exported(read_inputs([folder / "bench.jsonl"]), ["bench.jsonl"], form)
    text = data.decode()
    assert "headline gpt2" in text
    if form == "html":
        assert "<img src=x>" not in text
        assert "=evil&lt;/script&gt;" in text
    if form == "csv":
        assert ",=evil" not in text


def test_strategies_alone_say_which_is_fastest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_memopt(["report", "--format", "markdown", "-o", "-", str(folder / "compared.json")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("### auto is the fastest of 3 strategies within 6.84 KiB")
    assert "| vdnn | – | – |" in text
    assert "&lt;b&gt;" in page(read_inputs([folder / "compared.json"]), ["x"]) or "\\u003cb" in page(
        read_inputs([folder / "compared.json"]), ["x"]
    )


@pytest.mark.parametrize(
    "text",
    ['{"job": 1}', '{"job": "a"}\n[1]', '{"job": "a"}\nnonsense', '{"schema": "memopt.plan/1", "strategies": [{}], "budget_bytes": 1}',
     '{"schema": "memopt.plan/1", "strategies": [{"strategy": "a", "predicted_peak_bytes": "x"}], "budget_bytes": 1, "plain_step_ms": 1, "unplanned_peak_bytes": 1}'],
)  # fmt: skip
def test_what_is_neither_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "thing.json"
    path.write_text(text)
    with pytest.raises(BadFile):
        load_any(path)
