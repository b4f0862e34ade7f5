"""`memopt advise` and `memopt strategies`: files, exit codes, what goes to which stream."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memopt.advisors.advise import Adviser, Decided
from memopt.cli.main import run
from memopt.device import Device
from memopt.plan import load_plan
from memopt.trace import Script, Trace, load_trace
from memopt.units import format_bytes
from tests.support.layers_trace import Layer, build, chain


@pytest.fixture
def trace() -> Trace:
    return build(chain([4000] * 10, [1, 5] * 5))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Trace) -> Path:
    monkeypatch.chdir(tmp_path)
    trace.save(tmp_path / "memopt-train.profile.json.gz")
    return tmp_path


def advise(*args: str) -> int:
    return run(["advise", "--time-limit", "1", *args])


def test_the_plan_is_written_and_the_next_command_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise("memopt-train.profile.json.gz", "--budget", "70%") == 0
    said = capsys.readouterr()
    assert "Peak" in said.out
    assert "Biggest actions" in said.out
    assert said.err.splitlines() == [
        "memopt: wrote memopt-train.plan.json",
        "memopt: next: memopt apply memopt-train.plan.json",
    ]
    plan = load_plan(folder / "memopt-train.plan.json")
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.profile == "memopt-train.profile.json.gz"


def test_the_newest_profile_is_taken_and_named(
    folder: Path, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(folder / "memopt-train.profile.json.gz", (1, 1))
    trace.save(folder / "memopt-new.profile.json.gz")
    assert advise("--budget", "70%", "-o", "x.json") == 0
    assert "memopt: using memopt-new.profile.json.gz, the newest profile here" in capsys.readouterr().err
    assert (folder / "x.json").exists()


def test_no_profile_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert advise("--budget", "70%") == 2
    assert "no profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--strategy", "capuchn"], "try: capuchin"),
        (["--budget", "abc"], "not an amount of memory"),
        (["--budget", "16"], "try: --budget 16GB, or --budget 16B"),
        (["--budget", "0"], "try: --budget min"),
        (["--allow", "magic"], "not a kind of action"),
        (["--device", "a100-40"], None),
        (["-o", os.devnull, "--force"], "it is a device"),
        (["--max-batch", "--strategy", "nope"], "no strategy 'nope'"),
        (["--max-overhead", "much"], "not a share of time"),
        (["--max-overhead", "10"], "'10' may mean 10 % of the step or 10 times it"),
    ],
)
def test_what_was_typed_is_judged_before_any_file(
    args: list[str], says: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "memopt-train.plan.json").write_text("mine")
    goal = [] if {"--budget", "--max-overhead"} & set(args) else ["--budget", "70%"]
    assert advise(*goal, *args) == 2
    told = capsys.readouterr().err
    assert ("exists already" in told) == (says is None)
    assert says is None or says in told
    assert "\n  try: " in told


@pytest.mark.parametrize("option", ["--pareto", "--max-batch", "--explain=x", "--device=t4", "-o=x"])
def test_a_graph_has_no_such_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise("--graph", "nowhere.json", "--budget", "70%", option) == 2
    assert "does not go with --graph" in capsys.readouterr().err


def test_an_error_says_which_setting_it_comes_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = folder / "pyproject.toml"
    settings.write_text('[tool.memopt]\nbudget = "abc"\n[tool.memopt.advise]\nallow = "recompute,magic"\n')
    assert advise() == 2
    assert f"it is set by [tool.memopt.advise] in {settings}" in capsys.readouterr().err
    settings.write_text('[tool.memopt]\nbudget = "abc"\ntop = "x"\n')
    assert advise() == 2
    assert f"It is set by [tool.memopt] in {settings}." in capsys.readouterr().err
    settings.write_text("")
    monkeypatch.setenv("MEMOPT_ADVISE_BUDGET", "zz")
    assert advise() == 2
    assert "it is set by MEMOPT_ADVISE_BUDGET" in capsys.readouterr().err


def test_nothing_is_overwritten_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "memopt-train.plan.json").write_text("mine")
    assert advise("--budget", "70%") == 2
    assert (folder / "memopt-train.plan.json").read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert advise("--budget", "70%", "-f") == 0
    load_plan(folder / "memopt-train.plan.json")
    assert advise("--budget", "80%") == 0, "memopt wrote it for the same script"
    trace = load_trace(folder / "memopt-train.profile.json.gz")
    other = msgspec.structs.replace(trace, script=Script(argv=["train.py"], cwd="/elsewhere"))
    other.save(folder / "other.profile.json.gz")
    capsys.readouterr()
    assert advise("other.profile.json.gz", "--budget", "80%") == 2
    assert "exists already" in capsys.readouterr().err
    assert advise("-o", "memopt-train.profile.json.gz", "--budget", "80%") == 2, "a profile is no plan"


def test_json_is_all_that_is_on_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise("--budget", "70%", "--json", "--explain", "Net.3") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["kind"] == "plan"
    assert figures["plan"] == "memopt-train.plan.json"
    # the parameter, the input, and the outputs of layers 0 and 1 when the second is made
    assert figures["floor_bytes"] == 1000 + 10 + 2 * 4000
    assert figures["floor"] == "no plan can go below 8.80 KiB: forward of Net.1 (aten.exp.default)"
    assert figures["lints"] == []
    assert figures["predicted_peak_bytes"] <= figures["budget_bytes"]
    options = {each["what"]: each for each in figures["explanation"]["alternatives"]}
    assert set(options) == {"keep", "recompute"}
    assert sum(each["chosen"] for each in options.values()) == 1


def test_a_budget_that_cannot_be_met(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise("--budget", "1KB") == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "cannot be met: the smallest peak found is" in said.err
    assert "no plan can go below 8.80 KiB: forward of Net.1 (aten.exp.default)" in said.err
    assert "--strategy auto" not in said.err
    assert not (folder / "memopt-train.plan.json").exists()
    again = said.err.splitlines()[-1].removeprefix("  try: ")
    assert again == "memopt advise memopt-train.profile.json.gz --budget 8.853KiB --time-limit 1"
    assert run(again.split()[1:]) == 0
    capsys.readouterr()
    assert advise("--budget", "1KB", "--strategy", "sublinear") == 3
    said = capsys.readouterr()
    assert "--strategy auto may find more" in said.err
    again = said.err.splitlines()[-1].removeprefix("  try: ")
    assert "--strategy sublinear" in again
    assert run(again.split()[1:]) == 0, "in place of the plan that was written before"


def test_the_smallest_peak_is_a_budget(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8.80 KiB is the floor: no plan goes lower."""
    assert advise("--budget", "min") == 0
    assert "the smallest peak found" in capsys.readouterr().out.replace("\n", " ")
    plan = load_plan(folder / "memopt-train.plan.json")
    assert plan.predicted_peak_bytes == plan.budget_bytes == 9010
    assert advise("--budget", "min", "--deny", "recompute", "-o", "none.json") == 0
    assert load_plan(folder / "none.json").actions == []
    assert "no plan found lowers the peak" in capsys.readouterr().out.replace("\n", " ")
    assert advise("--budget", "min", "--strategy", "auto", "--strategy", "rotor") == 2


def test_what_holds_the_floor_and_what_would_move_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One parameter is nearly all there is: no plan lowers the peak, nor would a smaller batch."""
    profile, plan = str(tmp_path / "p.profile.json.gz"), str(tmp_path / "p.json")
    trace = build(chain([100] * 4), state=100_000)
    trace.save(Path(profile))
    assert advise(profile, "--budget", "60%", "-o", plan) == 3
    lines = capsys.readouterr().err.splitlines()
    assert f"the smallest peak found is {format_bytes(trace.peak_bytes)}" in lines[0]
    assert "that is the run as it is: no plan was found that lowers it" in lines[1]
    assert lines[2].startswith("  held by parameters 97.7 KiB, ")
    assert lines[3].startswith("  less with parameters in fewer bits or sharded over devices (fully_shard)")
    assert lines[4:] == [], "a budget above the plain peak is no help"
    build(chain([30_000] * 4), state=30_000).save(Path(profile))
    assert advise(profile, "--budget", "20%", "-o", plan) == 3
    assert "a smaller batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        (), ("--budget", "0"), ("--budget", "-5"), ("--budget", "abc"), ("--budget", "1KB", "--pareto"),
        ("--budget", "70%", "--strategy", "best"), ("--budget", "70%", "--allow", "magic"),
        ("--budget", "70%", "--strategy", "auto", "--variant", "all"), ("--max-overhead", "ten"), ("--max-overhead", "-1%"),
        ("--budget", "70%", "--out-gbps", "3"), ("--budget", "70%", "--explain", "no such tensor"), ("--budget", "70%", "--explain", " "),
        ("--pareto", "--strategy", "auto", "--strategy", "sublinear"), ("--budget", "70%", "--time-limit", "0"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(
    folder: Path, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["advise", *args]) == 2
    assert capsys.readouterr().out == ""
    assert list(folder.glob("*.plan.json")) == []


def test_strategies_are_compared_and_the_best_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (
        "--budget",
        "70%",
        "--strategy",
        "sublinear",
        "--strategy",
        "auto",
        "--strategy",
        "capuchin",
        "--json",
    )
    assert advise(*args) == 0
    figures = json.loads(capsys.readouterr().out)
    rows = {row["strategy"]: row for row in figures["strategies"]}
    assert list(rows) == ["sublinear", "auto", "capuchin"]
    steps = [row["predicted_step_ms"] for row in rows.values() if row["feasible"]]
    assert figures["predicted_step_ms"] == min(steps) == rows["auto"]["predicted_step_ms"]


def test_the_comparison_is_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise("--budget", "70%", "--strategy", "sublinear", "--strategy", "auto") == 0
    out = capsys.readouterr().out
    assert "overhead" in out
    assert "sublinear" in out


def test_denied_kinds_are_not_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise("--budget", "70%", "--deny", "recompute") == 3
    assert "fewer kinds of action denied" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["lossy", "model-change"])
def test_what_is_not_exact_may_be_allowed_and_is_said_to_do_nothing(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise("--budget", "70%", "--allow", kind) == 0
    assert f"Note: --allow {kind} changes n" in capsys.readouterr().out.replace("\n", " ")
    plan = load_plan(folder / "memopt-train.plan.json")
    assert {action.kind for action in plan.actions} == {"recompute"}


@pytest.mark.solver
def test_the_overhead_can_be_the_budget(folder: Path, trace: Trace) -> None:
    assert advise("--max-overhead", "10%") == 0
    plan = load_plan(folder / "memopt-train.plan.json")
    assert plan.predicted_step_ms <= 1.1 * trace.step_ms
    assert plan.predicted_peak_bytes < trace.peak_bytes
    assert advise("--max-overhead", "40%", "-o", "more.json") == 0
    assert load_plan(folder / "more.json").predicted_peak_bytes < plan.predicted_peak_bytes


def test_the_plan_for_an_overhead_is_the_one_that_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No search runs again for the explanation: what the last one decided is what is written and explained."""
    searched: list[int] = []
    decide = Adviser.decide

    def counted(self: Adviser, budget_bytes: int, strategy: str = "auto") -> Decided:
        searched.append(budget_bytes)
        return decide(self, budget_bytes, strategy)

    monkeypatch.setattr(Adviser, "decide", counted)
    assert advise("--max-overhead", "10%", "--explain", "Net.0", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(searched) == len(set(searched)), "each budget once"
    chosen = [each for each in figures["explanation"]["alternatives"] if each["chosen"]]
    assert [each["peak_bytes"] for each in chosen] == [figures["predicted_peak_bytes"]]
    assert [each["step_ms"] for each in chosen] == [figures["predicted_step_ms"]]


def test_an_overhead_that_buys_nothing_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise("--max-overhead", "0%", "--deny", "compress,swap") == 0
    plan = load_plan(folder / "memopt-train.plan.json")
    assert plan.actions == []
    assert "for at most 0 % of the step" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.solver
def test_the_curve(folder: Path, capsys: pytest.CaptureFixture[str], trace: Trace) -> None:
    assert run(["advise", "--time-limit", "0.3", "--pareto", "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert json.loads((folder / "memopt-train.pareto.json").read_text()) == figures
    met = [point for point in figures["points"] if point["feasible"]]
    assert len(met) >= 3
    assert all(point["predicted_peak_bytes"] <= point["budget_bytes"] for point in met)
    steps_ms = [point["predicted_step_ms"] for point in met]
    assert steps_ms == sorted(steps_ms), "a smaller budget has a faster plan, which fits the larger one too"
    assert met[-1]["predicted_peak_bytes"] < met[0]["predicted_peak_bytes"] < trace.peak_bytes
    assert run(["advise", "--time-limit", "0.3", "--pareto"]) == 0
    assert "Peak against step time" in capsys.readouterr().out


def test_explain_says_what_stands_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    layers = [Layer(8000, replayable=False), *chain([4000] * 8)[1:]]
    build(layers, device=Device(kind="cpu")).save(tmp_path / "a.profile.json.gz")
    assert advise("--budget", "80%", "--explain", "Net.0", "-o", "a.json") == 0
    out = capsys.readouterr().out
    assert "It is too small to matter, or nothing that is allowed can be done with it." in out
    assert advise("--budget", "80%", "--explain", "Net.weight", "-o", "b.json") == 0
    assert "only tensors that autograd saves" in capsys.readouterr().out
    assert advise("--budget", "80%", "--explain", "gradient", "-o", "c.json") == 0
    said = "8 tensors have 'gradient' in their names; for another one --explain NUMBER: 11, 12, 13, 14, 15, 16 and more."
    assert said in capsys.readouterr().out


def test_a_budget_above_the_peak_writes_an_empty_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise("--budget", "200%") == 0
    assert load_plan(folder / "memopt-train.plan.json").actions == []
    assert "nothing to do" in capsys.readouterr().out


def test_a_partial_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(chain([400] * 3), partial="the script raised").save(tmp_path / "p.profile.json.gz")
    assert advise(str(tmp_path / "p.profile.json.gz"), "--budget", "70%", "-o", str(tmp_path / "x.json")) == 1
    assert "the script raised" in capsys.readouterr().err


def test_strategies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["strategies"]) == 0
    shown = capsys.readouterr().out
    assert "capuchin" in shown
    assert "recompute, swap; needs a link" in shown
    assert run(["strategies", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert {"auto", "sublinear", "capuchin"} <= {row["name"] for row in rows if row["plans"] == "profiles"}
    assert all(row["paper"] and row["needs"] for row in rows)
    assert [row["name"] for row in rows if not row["allows"]] == ["megatron"]
    assert {row["name"] for row in rows if not row["enforced"]} == {
        "zero-offload",
        "cdma",
        "megatron",
        "ctdr",
    }
