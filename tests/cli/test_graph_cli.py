"""`memopt advise --graph` through its function: what is printed, written and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memopt.cli.advise.graph_plan import advise_graph
from memopt.cli.main import run
from memopt.errors import BadFile, BudgetInfeasible, NotPossibleHere, UsageError

GRAPH: dict[str, Any] = {
    "schema": "memopt.graph/1",
    "name": "chain",
    "tensors": [{"id": 10 * i, "bytes": 100} for i in range(5)],
    "ops": [
        {"name": "f0", "ms": 1, "reads": [], "writes": [0]},
        {"name": "f1", "ms": 8, "reads": [0], "writes": [10]},
        {"name": "f2", "ms": 8, "reads": [10], "writes": [20]},
        {"name": "b1", "ms": 4, "reads": [20, 10], "writes": [30]},
        {"name": "b0", "ms": 4, "reads": [30, 0], "writes": [40]},
    ],
    "keep": [40],
}


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH))
    return path


def test_json_and_schedule(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "schedule.json"
    code = advise_graph(graph, budget="300", schedule=target, time_limit_s=1, as_json=True)
    assert code == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["unplanned_peak_bytes"] == 400
    assert figures["best"] == "auto"
    (plan,) = figures["strategies"]
    assert plan["overhead"] == pytest.approx(1 / 25)
    assert plan["peak_bytes"] == plan["floor_bytes"] == 300
    schedule = json.loads(target.read_text())
    assert schedule["schema"] == "memopt.schedule/1"
    assert [what for verb, what in schedule["steps"] if verb == "run"] == [0, 1, 2, 3, 0, 4]
    assert advise_graph(graph, budget="75%", schedule=target, time_limit_s=1) == 0, "of the same graph"
    target.write_text(target.read_text().replace('"chain"', '"another"'))
    with pytest.raises(UsageError, match="exists already"):
        advise_graph(graph, budget="300", schedule=target)
    assert advise_graph(graph, budget="75%", schedule=target, force=True, time_limit_s=1) == 0


def test_table_compares_strategies(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise_graph(graph, budget="300", strategies=("auto", "lru", "vdnn"), time_limit_s=1) == 0
    text = capsys.readouterr().out
    assert "chain: 5 ops, 5 tensors" in text
    assert "4.00%" in text
    assert "budget not met" in text


def test_infeasible(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        advise_graph(graph, budget="299", time_limit_s=1)
    assert caught.value.min_peak_bytes == 300
    assert capsys.readouterr().out == ""
    assert advise_graph(graph, budget="299", strategies=("dtr", "vdnn"), time_limit_s=1, as_json=True) == 3
    figures = json.loads(capsys.readouterr().out)
    assert [row["feasible"] for row in figures["strategies"]] == [False, False]
    assert figures["best"] is None


@pytest.mark.parametrize(
    "options",
    [
        {"allow": ("compress",)},
        {"allow": ("recompute,nonsense",)},
        {"strategies": ("magic",)},
        {"budget": "lots"},
        {"schedule": Path("/nowhere/s.json")},
    ],
)
def test_arguments_that_cannot_be_meant(graph: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        advise_graph(graph, **{"budget": "300", **options})


def test_deny_recompute(graph: Path) -> None:
    with pytest.raises(BudgetInfeasible):
        advise_graph(graph, budget="300", deny=("recompute",), time_limit_s=1)


def test_no_graph(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    for name, error in (("x.json", BadFile), ("none.json", UsageError)):
        with pytest.raises(error):
            advise_graph(tmp_path / name, budget="300")


def test_a_strategy_that_cannot_plan_graphs_is_a_line_of_the_comparison(
    graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"budget": "300", "time_limit_s": 1}
    assert advise_graph(graph, strategies=("gist", "msps"), **options) == 0
    text = capsys.readouterr().out
    assert "not possible here" in text
    assert (
        "gist is not possible here: gist plans profiles only, not plain graphs; which encoding"
        in " ".join(text.split())
    )
    assert "4.00%" in text
    assert advise_graph(graph, strategies=("gist", "msps", "gist"), as_json=True, **options) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["best"] == "msps"
    assert [row["feasible"] for row in figures["strategies"]] == [False, True]
    assert figures["strategies"][0]["not_possible_here"].startswith("gist plans profiles only")
    with pytest.raises(NotPossibleHere):
        advise_graph(graph, strategies=("gist",), **options)
    assert advise_graph(graph, strategies=("gist", "cdma"), **options) == 1
    assert advise_graph(graph, strategies=("gist", "vdnn"), **options) == 3


def test_a_share_of_a_graph_without_bytes_says_what_it_is_a_share_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"schema": "memopt.graph/1", "name": "g", "tensors": [], "ops": []}))
    assert run(["advise", "--graph", str(path), "--budget", "60%"]) == 2
    told = capsys.readouterr().err
    assert "'60%' is less than one byte\n  it is a share of the unplanned peak, which is 0 B\n" in told
    assert told.endswith("try: --budget min, for as little as can be\n")
    assert run(["advise", "--graph", str(path), "--budget", "min", "--time-limit", ".2"]) == 0


@pytest.mark.solver
def test_a_rate_that_is_left_out_is_as_the_other(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "schedule.json"
    options: dict[str, Any] = {"budget": "300", "schedule": target, "force": True, "time_limit_s": 0.3}
    rates: list[dict[str, float]] = [
        {"out_gbps": 12},
        {"in_gbps": 12},
        {"out_gbps": 12, "in_gbps": 12},
        {"out_gbps": 12, "in_gbps": 0},
        {},
    ]
    for given, written in zip(rates, ((12, 12), (12, 12), (12, 12), (12, 0), (0, 0)), strict=True):
        assert advise_graph(graph, **given, **options) == 0
        schedule = json.loads(target.read_text())
        assert (schedule["out_gbps"], schedule["in_gbps"]) == written
        said = "was left out: the link has 12 GB/s both ways" in capsys.readouterr().err
        assert said == (len(given) == 1)


def test_the_smallest_peak_is_a_budget(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "s.json"
    assert advise_graph(graph, budget="min", schedule=target, time_limit_s=1, as_json=True) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["budget_bytes"] == figures["strategies"][0]["peak_bytes"] == 300
    assert advise_graph(graph, budget="min", strategies=("vdnn",), time_limit_s=1) == 0, "the plain schedule"
    with pytest.raises(UsageError, match="cannot be met"):
        advise_graph(graph, budget="0", time_limit_s=1)
    assert advise_graph(graph, budget=str(2**59 + 1), schedule=target, time_limit_s=1) == 0
    assert json.loads(target.read_text())["budget_bytes"] == 2**53, "what every JSON reader keeps exactly"


def test_a_refusal_ends_with_a_command_that_works(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["advise", "--graph", str(graph), "--budget", "200", "--time-limit", "1"]) == 3
    again = capsys.readouterr().err.splitlines()[-1].removeprefix("  try: ")
    assert again == f"memopt advise --graph {graph} --budget 302 --time-limit 1"
    assert run(again.split()[1:]) == 0
