"""What reports are made of: tables, figures, forms for other programs, and the comparison of two files."""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memopt.cli.main import run as run_memopt
from memopt.errors import BadFile, MemoptError, NotPossibleHere, UsageError
from memopt.outcome import Outcome, load_outcome
from memopt.reports import figures, frames
from memopt.reports.comparison import compare, side_of
from memopt.reports.formats.export import exported
from memopt.reports.formats.markdown import markdown
from memopt.reports.headline import of_inputs
from memopt.reports.inputs import Inputs, Run, load_any, read_inputs
from memopt.reports.page.html import page
from memopt.reports.page.moment import peak_of
from memopt.reports.page.source import Source
from memopt.reports.text import esc, json_in_html, shown, together
from memopt.trace import Script, Trace, load_trace
from tests.cli.test_show import OUTCOME, toy_plan
from tests.estimators.test_snapshot import snapshot_of
from tests.support.browser import CHROMIUM
from tests.support.layers_trace import build, chain
from tests.support.toy_trace import toy_trace

HTML_FORMS = ("html", "perfetto", "memory-viz", "csv", "json", "markdown")


def inputs_of(trace: Trace) -> Inputs:
    return Inputs(runs=[Run("toy", trace)])


def saved(folder: Path, trace: Trace, name: str = "toy.profile.json.gz") -> Path:
    trace.save(folder / name)
    return folder / name


# --- tables


def test_categories_add_up_to_what_is_on_the_device() -> None:
    trace = toy_trace()
    series = frames.bytes_by_category(trace)
    assert list(series) == list(frames.STACKED)
    assert sum(series.values()).tolist() == frames.high_bytes(trace).tolist() == [7300, 8000, 8500, 8900]
    peak = peak_of(trace)
    assert {name: int(row[peak.op]) for name, row in series.items() if row[peak.op]} == peak.by_category


def test_the_table_of_tensors_is_the_moment_of_the_peak() -> None:
    trace = toy_trace()
    frame = frames.tensors(trace)
    assert frame[frame.at_peak].size_bytes.sum() == peak_of(trace).named_bytes
    assert frame.loc[4, ["category", "birth_op", "death_op", "line"]].tolist() == [
        "activation",
        0,
        3,
        "net.py:3",
    ]
    assert frame.loc[4, "recompute_ms"] > 0
    assert np.isnan(frame.loc[0, "recompute_ms"])


def test_actions_come_largest_saving_first() -> None:
    assert frames.actions(toy_plan()).saved_bytes.tolist() == [3000, 2000, 1000]


def test_ops_are_a_table_too() -> None:
    frame = frames.ops(toy_trace())
    assert frame.phase.tolist() == ["forward", "forward", "backward", "backward"]
    assert frame.live_bytes.tolist() == [3300, 7300, 7300, 8300]


# --- figures


def test_thinning_keeps_every_stretch_and_its_peak() -> None:
    high = np.arange(10_000) % 97
    high[4321] = 5000
    at = figures.thinned(high, 100)
    assert len(at) == 100
    assert 4321 in at
    assert (np.diff(at) > 0).all()


def test_the_stacked_picture_reaches_the_peak() -> None:
    figure = figures.area(toy_trace(), budget_bytes=8000)
    assert max(np.sum([trace.y for trace in figure.data], axis=0)) == 8900
    assert {trace.name for trace in figure.data} <= set(figures.COLORS)
    assert any(shape.name == "budget" for shape in figure.layout.shapes)


def test_phases_are_stretches() -> None:
    assert figures.phases(toy_trace()) == [(0, 2, "forward"), (2, 4, "backward")]


# --- text that somebody else wrote


def test_text_is_safe_and_short() -> None:
    assert esc("<b>&\"'\u202e\x1b") == "&lt;b&gt;&amp;&quot;&#x27;\ufffd\ufffd"
    assert len(shown("x" * 10_000_000)) < 250
    assert "<" not in json_in_html({"a": "</script><!--"})
    assert json.loads(json_in_html({"a": "</script>\u2028"})) == {"a": "</script>\u2028"}
    assert together("4.00 MiB of 16 GB, 5 % in 3 ms") == "4.00\u00a0MiB of 16\u00a0GB, 5\u00a0% in 3\u00a0ms"


def test_markdown_shows_names_as_they_are_and_mentions_nobody() -> None:
    trace = toy_trace()
    hostile = "|@everyone `x` [a](http://b) <img>"
    strings = [text.replace("Net.fc", hostile) for text in trace.strings]
    text = markdown(inputs_of(msgspec.structs.replace(trace, strings=strings)))
    assert "@everyone" not in text
    assert "<img" not in text.replace("\\<", "")
    assert all(
        line.count("|") - line.count("\\|") in (4, 5) for line in text.splitlines() if line.startswith("|")
    )


def test_lines_of_the_script_are_shown_only_where_they_are_what_ran(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "train.py"
    path.write_text("".join(f"line {number}\n" for number in range(1, 11)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    script = Script(argv=["train.py"], cwd=str(tmp_path), sha256=digest)
    assert Source(script).around("train.py:5") == [(i, f"line {i}", i == 5) for i in range(3, 8)]
    assert Source(script).around("other.py:5") == []
    assert Source(msgspec.structs.replace(script, sha256="0" * 64)).around("train.py:5") == []
    assert Source(script).around("train.py:99") == []


@pytest.mark.parametrize("form", HTML_FORMS)
def test_without_source_nothing_of_the_script_is_in_it(tmp_path: Path, form: str) -> None:
    trace = toy_trace(script=Script(argv=["secret_train.py", "--token", "hunter2"], cwd="/home/secret"))
    strings = [
        text.replace("train.py", "secret_train.py").replace("net.py", "secret_net.py")
        for text in trace.strings
    ]
    trace = msgspec.structs.replace(trace, strings=strings)
    data = exported(inputs_of(trace), ["toy"], form, with_source=False)
    assert b"secret" not in data
    assert b"hunter2" not in data
    assert b"secret" in exported(inputs_of(trace), ["toy"], form)


@pytest.mark.parametrize("form", HTML_FORMS)
def test_without_source_a_snapshot_names_no_file_and_no_function(tmp_path: Path, form: str) -> None:
    """The labels of its tensors are made of the stacks."""
    inputs = read_inputs([snapshot_of(tmp_path, "medium_512_inference")])
    data = exported(inputs, ["x"], form, with_source=False)
    if form == "html":
        packed = re.search(rb'id="data">gzip:([A-Za-z0-9+/=]+)', data)
        data += gzip.decompress(base64.b64decode(packed[1])) if packed else b""
    assert b"train.py" not in data
    assert b"the script" in data or form == "memory-viz"
    assert b"train.py" in exported(inputs, ["x"], form) or form == "html"


# --- forms for other programs


@pytest.mark.parametrize("form", HTML_FORMS)
def test_the_same_input_gives_the_same_bytes(form: str) -> None:
    assert exported(inputs_of(toy_trace()), ["toy"], form) == exported(inputs_of(toy_trace()), ["toy"], form)


def test_perfetto_has_every_op_once_and_the_bytes_of_each_category() -> None:
    trace = toy_trace()
    events = json.loads(exported(inputs_of(trace), ["toy"], "perfetto"))["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    assert [each["args"]["op"] for each in slices] == [0, 1, 2, 3]
    counters = [each for each in events if each["ph"] == "C"]
    assert [sum(each["args"].values()) for each in counters] == frames.high_bytes(trace).tolist()
    spans = {ph: {each["id"] for each in events if each["ph"] == ph} for ph in "be"}
    assert spans["b"] == spans["e"] == set(range(trace.storage_count))
    for row in (slices, counters):
        times = [each["ts"] for each in row]
        assert times == sorted(times)
    ends = [each["ts"] + each["dur"] for each in slices]
    assert all(end <= after["ts"] + 1e-6 for end, after in zip(ends, slices[1:], strict=False))


def test_torchs_own_viewer_reads_the_pickle(tmp_path: Path) -> None:
    trace = build(chain([5000, 70_000, 900, 4096, 12]))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(exported(inputs_of(trace), ["toy"], "memory-viz"))
    code = (
        "import pickle, sys; from torch.cuda import _memory_viz as viz; d = pickle.load(open(sys.argv[1], 'rb'));"
        "print(viz.segsum(d)); print(viz.trace(d)); print(len(viz.trace_plot(d)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "total_allocated: 1010.0B" in done.stdout  # the parameter and the input, which outlive the step
    assert "Device 0" in done.stdout


def test_the_pickle_brings_the_recorded_bytes_back(tmp_path: Path) -> None:
    """Read by our own reader of torch's snapshots: the same peak, and no two tensors at one place."""
    trace = build(chain([5120, 70_144, 512, 4096, 1024]), state=512)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(exported(inputs_of(trace), ["toy"], "memory-viz"))
    back = load_any(path)
    assert isinstance(back, Trace)
    sizes = [
        size for size in trace.storages.size_bytes if size > 10
    ]  # the input is rounded up, as torch does
    assert sorted(back.storages.size_bytes)[1:] == sorted(sizes)
    assert 0 <= back.peak_bytes - trace.peak_bytes <= 512
    events = pickle.loads(path.read_bytes())["device_traces"][0]
    there: dict[int, int] = {}
    for event in events:
        start, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(start + size <= other or other + length <= start for other, length in there.items())
            there[start] = size
        elif event["action"] == "free_completed":
            there.pop(start, None)


def test_csv_and_json_hold_every_tensor(tmp_path: Path) -> None:
    import io

    import pandas

    trace = toy_trace()
    table = pandas.read_csv(io.BytesIO(exported(inputs_of(trace), ["toy"], "csv")))
    assert table.size_bytes.sum() == sum(trace.storages.size_bytes)
    found = json.loads(exported(inputs_of(trace), ["toy"], "json"))
    assert found["schema"] == "memopt.report/1"
    assert found["profiles"][0]["peak_bytes"] == 8900
    assert len(found["profiles"][0]["tensors"]) == trace.storage_count


def test_a_spreadsheet_computes_nothing_from_a_name() -> None:
    trace = toy_trace()
    strings = [text.replace("Net.fc", "=HYPERLINK(0)") for text in trace.strings]
    text = exported(inputs_of(msgspec.structs.replace(trace, strings=strings)), ["toy"], "csv").decode()
    assert ",=HYPERLINK" not in text
    assert "'=HYPERLINK" in text


def test_parquet_through_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    import io

    frame = pandas.read_parquet(io.BytesIO(exported(inputs_of(toy_trace()), ["toy"], "parquet")))
    assert frame.size_bytes.sum() == sum(toy_trace().storages.size_bytes)
    assert list(frame.storage) == list(range(len(frame)))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("kind", ["profile", "two profiles", "outcome"])
def test_png_is_drawn_by_the_browser_that_is_there(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("kaleido")
    first, second = saved(tmp_path, toy_trace()), saved(tmp_path, toy_trace(), "second.profile.json.gz")
    msgspec.convert(OUTCOME, Outcome).save(tmp_path / "outcome.json")
    files = {"profile": [first], "two profiles": [first, second], "outcome": [tmp_path / "outcome.json"]}[
        kind
    ]
    command = [sys.executable, "-m", "memopt", "report", "--format", "png", "-o", str(tmp_path / "a.png")]
    env = {**os.environ, "BROWSER_PATH": str(CHROMIUM)}
    done = subprocess.run([*command, *map(str, files)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", data[16:24]) == (2400, 1040)
    assert len(data) > 15_000, "a white picture takes less"


def test_png_without_a_browser_says_what_is_missing(tmp_path: Path) -> None:
    path = saved(tmp_path, toy_trace())
    command = [
        sys.executable,
        "-m",
        "memopt",
        "report",
        "--format",
        "png",
        "-o",
        str(tmp_path / "a.png"),
        str(path),
    ]
    env = {**os.environ, "BROWSER_PATH": "/no/such/browser", "PATH": "/nowhere"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        pytest.skip("kaleido found a browser of its own")
    assert done.returncode == NotPossibleHere.exit_code
    assert "a PNG cannot be made here" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "a.png").exists()


# --- what files hold


def test_files_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    saved(tmp_path, toy_trace())
    plan = toy_plan()
    other = msgspec.structs.replace(plan.actions[0], label="another net")
    msgspec.structs.replace(plan, actions=[other]).save(tmp_path / "plan.json")
    msgspec.convert(OUTCOME, Outcome).save(tmp_path / "outcome.json")
    found = read_inputs([tmp_path / name for name in ("toy.profile.json.gz", "plan.json", "outcome.json")])
    assert (len(found.runs), len(found.plans), len(found.outcomes)) == (1, 1, 1)
    assert "shown without its profile" in found.notes[0]
    assert of_inputs(found).title.startswith("One step peaks at 8.69 KiB")
    assert "81.1" not in page(found, ["a", "b", "c"])


def test_what_was_measured_goes_before_what_was_predicted(tmp_path: Path) -> None:
    toy_plan().save(tmp_path / "plan.json")
    msgspec.convert(OUTCOME, Outcome).save(tmp_path / "outcome.json")
    predicted = of_inputs(read_inputs([tmp_path / "plan.json"]))
    assert predicted.title == "It fits: 6.64 KiB instead of 8.69 KiB, for 10 % more time"
    measured = of_inputs(read_inputs([tmp_path / "plan.json", tmp_path / "outcome.json"]))
    assert measured.title == "It fits: 6.74 KiB instead of 8.69 KiB, for 22 % more time"
    assert ("Measured", "6.74 KiB", "+1.5 %, 12.2 ms") in measured.figures
    over = msgspec.convert({**OUTCOME, "measured_peak_bytes": 7100}, Outcome)
    over.save(tmp_path / "over.json")
    found = of_inputs(read_inputs([tmp_path / "plan.json", tmp_path / "over.json"]))
    assert found.title.startswith("It does not fit: 6.93 KiB")
    assert found.tone == "bad"


def test_a_profile_says_what_a_plan_would_work_on() -> None:
    leads = of_inputs(inputs_of(toy_trace())).leads
    assert (
        "3.91 KiB of it only wait for the backward; memopt advise --budget 80% makes a plan for them."
        in leads
    )


def test_a_report_for_a_stdout_that_is_closed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, toy_trace())
    monkeypatch.setattr(sys, "stdout", None)
    assert run_memopt(["report", "--format", "json", str(path), "-o", "-"]) == 2
    assert "cannot write to stdout\n  it is closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", '{"schema": "memopt.graph/1"}', '{"schema": 3}', '{"kind": "pareto"}', '{"schema": "memopt.estimate/1"}',
     '{"kind": "pareto", "unplanned_peak_bytes": 1, "points": [{"budget_bytes": "x"}]}', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_file_of_ours_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "thing.json"
    path.write_text(text)
    with pytest.raises(BadFile, match="nothing that a report can show"):
        load_any(path)


def test_an_outcome_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    msgspec.convert(OUTCOME | {"measured_peak_bytes": -5}, Outcome).save(path)
    with pytest.raises(BadFile, match="not a usable outcome"):
        load_outcome(path)


def test_formats_that_show_one_profile_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one profile"):
        exported(Inputs(), [], "perfetto")


# --- the command


def test_report_writes_a_page_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, toy_trace(), "memopt-train.profile.json.gz")
    assert run_memopt(["report", "memopt-train.profile.json.gz"]) == 0
    text = (tmp_path / "memopt-train.report.html").read_text()
    assert text.startswith("<!doctype html>")
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|url\(|@import""", markup)
    assert run_memopt(["report", "memopt-train.profile.json.gz"]) == 0, "its own page"
    (tmp_path / "memopt-train.report.html").write_text("<p>mine</p>")
    assert run_memopt(["report", "memopt-train.profile.json.gz"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run_memopt(["report", "-o", "memopt-train.report.html", "memopt-train.profile.json.gz"]) == 2
    assert run_memopt(["report", "-f", "--format", "perfetto", "memopt-train.profile.json.gz"]) == 0
    assert (tmp_path / "memopt-train.perfetto.json").is_file()
    assert run_memopt(["report", "--open", "-o", "-", "memopt-train.profile.json.gz"]) == 2


def test_a_report_never_takes_the_place_of_what_it_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, toy_trace())
    (tmp_path / "link.json.gz").symlink_to(path)
    before = path.read_bytes()
    for target in (path, tmp_path / "link.json.gz", tmp_path / "." / path.name):
        assert run_memopt(["report", "-f", "-o", str(target), str(path)]) == 2
        assert "which it is made of" in capsys.readouterr().err
        assert path.read_bytes() == before


def test_an_empty_file_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(" \n")
    assert run_memopt(["report", str(tmp_path / "a.json")]) == 1
    assert "a.json is empty" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["outcome", "curve", "estimate"])
def test_every_file_with_figures_has_a_table(tmp_path: Path, kind: str) -> None:
    import io

    import pandas

    path = tmp_path / "file.json"
    curve = {
        "kind": "pareto",
        "unplanned_peak_bytes": 9,
        "points": [{"budget_bytes": 5, "feasible": True, "predicted_peak_bytes": 5}],
    }
    estimate = {
        "schema": "memopt.estimate/1",
        "allocated_bytes": 9,
        "by_category": {"input": 9},
        "by_module": {},
        "error": {},
        "fits": [],
        "left_out": [],
        "notes": [],
    }
    path.write_text(
        json.dumps(
            {"outcome": {"schema": "memopt.outcome/1", **OUTCOME}, "curve": curve, "estimate": estimate}[kind]
        )
    )
    table = pandas.read_csv(io.BytesIO(exported(read_inputs([path]), ["file.json"], "csv")))
    wanted = {"outcome": ("predicted", 6800), "curve": ("budget_bytes", 5), "estimate": ("size_bytes", 9)}[
        kind
    ]
    assert table[wanted[0]].iloc[0] == wanted[1]
    assert not any(name.startswith("Unnamed") for name in table.columns)


def test_report_to_stdout(tmp_path: Path) -> None:
    path = saved(tmp_path, toy_trace())
    done = subprocess.run(
        [sys.executable, "-m", "memopt", "report", "--format", "markdown", "-o", "-", str(path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.startswith("### One step peaks at 8.69 KiB")


# --- comparison


def test_two_profiles_differ_by_kind_module_and_line(tmp_path: Path) -> None:
    a = saved(tmp_path, build(chain([1000, 2000])), "a.profile.json.gz")
    b = saved(tmp_path, build(chain([1000, 5000])), "b.profile.json.gz")
    found = compare(a, b)
    assert found.peak.change == load_trace(b).peak_bytes - load_trace(a).peak_bytes > 0
    assert found.parts["line"][0].name == "net.py:2"
    assert found.parts["line"][0].change == 3000
    assert compare(a, a).parts == {"category": [], "module": [], "line": []} or not any(
        compare(a, a).parts.values()
    )
    text = json.dumps(found.as_json())
    assert json.loads(text)["peak_change_bytes"] == found.peak.change


@pytest.mark.parametrize(
    ("gate", "code"),
    [("5%", 3), ("500%", 0), ("1B", 3), ("1GB", 0), ("0", 3), ("-1%", 2), ("five", 2), ("nan%", 2), ("5", 2)],
)
def test_the_gate_fails_with_three_when_the_peak_has_grown(tmp_path: Path, gate: str, code: int) -> None:
    a = saved(tmp_path, build(chain([1000, 2000])), "a.profile.json.gz")
    b = saved(tmp_path, build(chain([1000, 5000])), "b.profile.json.gz")
    assert run_memopt(["compare", str(a), str(b), f"--fail-above={gate}"]) == code
    if code == 3:
        assert run_memopt(["compare", str(b), str(a), f"--fail-above={gate}"]) == 0
        assert run_memopt(["compare", str(a), str(a), f"--fail-above={gate}"]) == 0


def test_plans_and_outcomes_are_compared_by_their_peaks(tmp_path: Path) -> None:
    toy_plan().save(tmp_path / "plan.json")
    msgspec.convert(OUTCOME, Outcome).save(tmp_path / "outcome.json")
    found = compare(tmp_path / "plan.json", tmp_path / "outcome.json")
    assert (found.before.peak_bytes, found.after.peak_bytes) == (6800, 6900)
    msgspec.convert(OUTCOME | {"measured_peak_bytes": None}, Outcome).save(tmp_path / "none.json")
    with pytest.raises(MemoptError, match="cannot be compared"):
        side_of(tmp_path / "none.json")


@pytest.mark.parametrize("form", ["terminal", "markdown", "json"])
def test_compare_tells_it_in_every_form(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a = saved(tmp_path, build(chain([1000, 2000])), "a.profile.json.gz")
    assert run_memopt(["compare", str(a), str(a), "--format", form]) == 0
    assert "no change" in capsys.readouterr().out or form == "json"
