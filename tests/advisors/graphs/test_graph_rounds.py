"""Accumulated steps planned round by round: valid by the independent checker, as cheap as exhaustive search, and only where there are rounds."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.moments import overhead_bound
from memopt.advisors.graphs.graph import Graph, decode_graph
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.schedule import encode_schedule
from memopt.advisors.graphs.search.auto import at_once
from memopt.advisors.graphs.search.folded import fold
from memopt.advisors.graphs.search.rounds import Outline, classes, graph_of
from memopt.errors import BudgetInfeasible
from tests.advisors.graphs import schedule_checker as checker
from tests.support.training_graphs import families, shapes


def accumulation(rounds: int, layers: int) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(msgspec.json.encode(families.accumulation(rounds, layers)))
    return plain


def graph_from(plain: dict[str, Any]) -> Graph:
    return decode_graph(json.dumps(plain).encode())


def checked(plain: dict[str, Any], budget: int, **options: Any) -> tuple[float, dict[str, Any]]:
    graph = graph_from(plain)
    schedule = plan_graph(graph, budget, **options)
    found = checker.check(plain, json.loads(encode_schedule(schedule, graph)))
    assert found["peak_bytes"] == schedule.peak_bytes <= budget
    assert found["overhead"] == pytest.approx(schedule.overhead, abs=1e-9)
    assert schedule.overhead_bound <= schedule.overhead + 1e-12
    return float(found["overhead"]), schedule.stats


def toy(rounds: int) -> dict[str, Any]:
    """A round makes a, b and c from the batch x (`load`, once), then reads c, b, a and x and adds its gradient to the total."""
    tensors: list[dict[str, Any]] = []
    ops: list[dict[str, Any]] = []

    def op(name: str, ms: float, reads: list[int], size: int) -> int:
        tensors.append({"id": len(tensors), "bytes": size})
        ops.append(
            {
                "name": name,
                "ms": ms,
                "reads": reads,
                "writes": [len(tensors) - 1],
                "replayable": name != "load",
            }
        )
        return len(tensors) - 1

    total = -1
    for _ in range(rounds):
        x = op("load", 0.5, [], 1)
        a = op("f", 1, [x], 4)
        b = op("g", 2, [a], 4)
        c = op("h", 4, [b], 3)
        gradient = op("loss", 1, [c], 2)
        gradient = op("dh", 3, [gradient, b], 2)
        gradient = op("dg", 3, [gradient, a], 2)
        gradient = op("df", 3, [gradient, x], 2)
        total = op("add", 0.25, [gradient, total] if total >= 0 else [gradient], 2)
    return {"schema": "memopt.graph/1", "name": "toy", "tensors": tensors, "ops": ops, "keep": [total]}


@pytest.mark.slow
@pytest.mark.parametrize("budget", [14, 13, 12, 11])
def test_rounds_are_planned_as_well_as_exhaustive_search_plans_the_whole(budget: int) -> None:
    plain = toy(4)
    graph = graph_from(plain)
    problem = GraphProblem(graph=graph, budget_bytes=budget)
    least = checker.cheapest(plain, budget, graph.op_count + 5)
    folded = fold(problem, at_once)
    assert folded is not None
    folded.solve(now() + 0.3)
    if least is None:
        assert folded.refused
        return
    outcome = problem.replay(folded.answer().steps)
    assert outcome.rerun_ms == pytest.approx(least)
    assert checked(plain, budget, time_limit_s=0.3)[0] == pytest.approx(least / graph.plain_ms)


def test_the_bound_of_the_rounds_together_is_no_more_than_exhaustive_search_finds() -> None:
    for rounds in (2, 3, 4):
        plain = toy(rounds)
        graph = graph_from(plain)
        problem = GraphProblem(graph=graph, budget_bytes=12)
        least = checker.cheapest(plain, 12, graph.op_count + 5)
        parts = Outline(graph).parts(12)
        assert len(parts) == rounds
        bound = 0.0
        for group in classes(graph, parts, 10):
            inner = graph_of(graph, group, floor=True)
            alone = GraphProblem(graph=inner, budget_bytes=12)
            bound += len(group) * overhead_bound(alone) * inner.plain_ms
        assert 0 < bound <= least + 1e-9
        folded = fold(problem, at_once)
        if folded is not None:
            assert folded.overhead_bound() * graph.plain_ms == pytest.approx(bound)


@pytest.mark.parametrize("gbps", [0.0, 25.0])
@pytest.mark.parametrize("noise", ["times", "bytes", "both"])
def test_rounds_that_differ_a_little_get_valid_plans(noise: str, gbps: float) -> None:
    rnd = random.Random(7)
    plain = accumulation(12, 8)
    for row in plain["ops"] if noise != "bytes" else ():
        row["ms"] *= rnd.uniform(0.8, 1.2)
    for row in plain["tensors"] if noise != "times" else ():
        row["bytes"] = int(row["bytes"] * rnd.uniform(0.9, 1.1))
    graph = graph_from(plain)
    budget = int(0.6 * unplanned_peak(graph))
    overhead, stats = checked(plain, budget, time_limit_s=1.0, out_gbps=gbps, in_gbps=gbps)
    assert stats["parts"] == 12
    assert overhead < 0.5
    assert (overhead > 0) == (gbps == 0)


def test_a_class_of_unequal_rounds_is_planned_for_the_largest_bytes_and_the_mean_times() -> None:
    plain = toy(5)
    for number, op in enumerate(plain["ops"]):
        op["ms"] = 1 + number // 9
    plain["tensors"][9 * 3 + 1]["bytes"] = 5
    graph = graph_from(plain)
    parts = Outline(graph).parts(12)
    assert [(part.begin, part.end) for part in parts] == [(0, 9), (9, 18), (18, 27), (27, 36), (36, 45)]
    first, others = sorted(classes(graph, parts, 2), key=len)
    assert [part.begin for part in first] == [0]
    alone = graph_of(graph, others)
    assert alone.op_names == ["enter", "load", "f", "g", "h", "loss", "dh", "dg", "df", "add"]
    assert alone.op_ms.tolist() == [0.0] + [(2 + 3 + 4 + 5) / 4] * 9
    assert sorted(alone.tensor_bytes.tolist()) == sorted([1, 5, 4, 3, 2, 2, 2, 2, 2, 2, 0])
    assert alone.kept.sum() == 1
    assert unplanned_peak(alone) == 2 + 1 + 5 + 4 + 3 + 2  # the total, then the round at its loss


@pytest.mark.slow
def test_a_large_accumulated_step_is_planned() -> None:
    """It was refused: 6,540 ops."""
    plain = accumulation(80, 20)
    graph = graph_from(plain)
    overhead, stats = checked(plain, unplanned_peak(graph) * 7 // 10, time_limit_s=3.0)
    assert stats["classes"] == 2
    assert 0 < stats["first_s"] <= stats["seconds"]
    assert overhead < 0.08


def test_each_round_has_a_plan_before_one_is_searched_for() -> None:
    def refuse(problem: GraphProblem) -> Answer:
        raise BudgetInfeasible(problem.budget_bytes, 2 * problem.budget_bytes, ())

    graph = graph_from(accumulation(8, 8))
    problem = GraphProblem(graph=graph, budget_bytes=unplanned_peak(graph) * 6 // 10)
    folded = fold(problem, refuse)
    assert folded is not None
    folded.secure(now() + 60)
    assert folded.first_s > 0
    folded.solve(now() + 60)
    assert not folded.refused
    assert problem.replay(folded.answer().steps).peak_bytes <= problem.budget_bytes


@pytest.mark.slow
def test_a_refusal_names_a_peak_for_which_there_is_a_plan() -> None:
    plain = accumulation(8, 8)
    graph = graph_from(plain)
    with pytest.raises(BudgetInfeasible) as caught:
        plan_graph(graph, unplanned_peak(graph) // 4, time_limit_s=2.0)
    smallest = caught.value.min_peak_bytes
    assert smallest < 0.7 * unplanned_peak(graph)
    checked(plain, smallest, time_limit_s=2.0)


@pytest.mark.parametrize(
    "name", ["vgg16", "resnet50", "unet", "transformer12", "lstm60", "chain30", "experts8", "branches24"]
)
@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.4])
def test_one_forward_and_backward_pass_is_not_cut(name: str, share: float) -> None:
    graph = decode_graph(msgspec.json.encode(shapes.GRAPHS[name]()))
    assert Outline(graph).parts(int(share * unplanned_peak(graph))) == []


def test_ctrl_c_keeps_a_plan_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from memopt.advisors.graphs.search.neighbourhood import Search

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", interrupted)
    plain = accumulation(8, 8)
    overhead, stats = checked(plain, int(0.7 * unplanned_peak(graph_from(plain))), time_limit_s=2.0)
    assert stats["interrupted"] == 1
    assert 0 < overhead < 0.5
