"""What the planner says cannot be undercut, against exhaustive search; and that nothing valid is undercut by what it proves."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.bound_with_copies import Linked
from memopt.advisors.graphs.bounds.exact import Relaxed, prove
from memopt.advisors.graphs.bounds.moments import overhead_bound
from memopt.advisors.graphs.graph import decode_graph
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import floor_bytes
from memopt.advisors.registry import graph_strategies
from memopt.errors import BudgetInfeasible
from tests.advisors.graphs import schedule_checker as checker
from tests.advisors.graphs.planned_graphs import unit_chain

pytest.importorskip("highspy")


def random_graph(seed: int, ops: int) -> dict[str, Any]:
    """Mostly a chain and its backward, with skips, several outputs, workspaces, kept tensors and ops that run once."""
    rnd = random.Random(seed)
    tensors: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for position in range(ops):
        writes = [len(tensors) + i for i in range(rnd.choice((1, 1, 1, 2)))]
        known = [tensor["id"] for tensor in tensors]
        reads = {known[-1]} if known and rnd.random() < 0.8 else set()
        reads |= set(rnd.sample(known, min(len(known), rnd.choice((0, 0, 1, 2)))))
        if position >= ops // 2 and known:
            reads.add(known[min(len(known) - 1, 2 * (ops - position) - 1)])
        tensors += [{"id": t, "bytes": rnd.choice((0, 1, 2, 5, 9))} for t in writes]
        rows.append(
            {
                "ms": rnd.choice((0, 0.5, 1, 3)),
                "reads": sorted(reads),
                "writes": writes,
                "workspace_bytes": rnd.choice((0, 0, 2)),
                "replayable": rnd.random() < 0.9,
            }
        )
    keep = rnd.sample([t["id"] for t in tensors], 2)
    return {"schema": "memopt.graph/1", "name": "random", "tensors": tensors, "ops": rows, "keep": keep}


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_cheaper_than_the_bounds_and_auto_is_as_cheap_as_any(seed: int) -> None:
    plain = random_graph(seed, 8)
    graph = decode_graph(json.dumps(plain).encode())
    floor, _ = floor_bytes(graph, swap=False)
    peak = unplanned_peak(graph)
    for budget in sorted({floor, (floor + peak) // 2, floor + (peak - floor) // 4}):
        if budget >= peak:
            continue
        best = checker.cheapest(plain, budget, 13)
        problem = GraphProblem(graph=graph, budget_bytes=budget, until=now() + 1)
        if best is None:
            continue
        assert overhead_bound(problem) * graph.plain_ms <= best + 1e-6
        assert prove(problem, 1.0, Relaxed).bound_ms <= best + 1e-6
        for moments in ([0, graph.op_count - 1], list(range(1, graph.op_count, 2)), [graph.op_count // 2]):
            relaxed = Relaxed(problem, moments)
            assert relaxed.lower_bound() <= best + 1e-6
        try:
            schedule = plan_graph(graph, budget, time_limit_s=0.3)
        except BudgetInfeasible:
            pytest.fail(f"there is a plan of {best} ms under {budget}")
        assert schedule.overhead * graph.plain_ms <= best + 0.005 * graph.plain_ms + 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_with_a_link_undercuts_the_bounds(seed: int) -> None:
    plain = random_graph(seed, 12)
    graph = decode_graph(json.dumps(plain).encode())
    floor, _ = floor_bytes(graph, swap=True)
    budget = floor + (unplanned_peak(graph) - floor) // 3
    rnd = random.Random(seed)
    out_gbps, in_gbps = (rnd.choice((1e-6, 2e-6, 5e-6)) for _ in range(2))
    problem = GraphProblem(graph=graph, budget_bytes=budget, out_gbps=out_gbps, in_gbps=in_gbps)
    few = sorted(rnd.sample(range(graph.op_count), 3))
    bounds = [Linked(problem, moments).lower_bound() for moments in (few, list(range(graph.op_count)))]
    bounds += [prove(problem, 1.0, Linked).bound_ms, overhead_bound(problem) * graph.plain_ms]
    for strategy in graph_strategies():
        try:
            schedule = plan_graph(
                graph, budget, strategy=strategy, out_gbps=out_gbps, in_gbps=in_gbps, time_limit_s=0.3
            )
        except BudgetInfeasible:
            continue
        assert schedule.overhead * graph.plain_ms >= max(bounds) - 1e-5


def test_bytes_that_only_the_link_can_take_cost_its_time() -> None:
    """At b(19), 20 ms in, 21 bytes are there for 3: at 1 byte per ms 18 of them leave in time, at half the rate only after 36 ms."""
    graph = decode_graph(json.dumps(unit_chain(20)).encode())
    problem = GraphProblem(
        graph=graph, budget_bytes=3, out_gbps=1e-6, in_gbps=1e-6, allow=frozenset({"swap"})
    )
    assert overhead_bound(problem) * graph.plain_ms == pytest.approx(0.0, abs=1e-6)
    slow = replace(problem, out_gbps=0.5e-6)
    assert overhead_bound(slow) * graph.plain_ms == pytest.approx(36 - 20)


def test_chain_is_solved_and_proved() -> None:
    """Of 20 activations all but 3 must go: at 5 bytes, at the first backward op 3 are there beside a(19) and the gradient."""
    graph = decode_graph(json.dumps(unit_chain(20)).encode())
    assert unplanned_peak(graph) == 21
    schedule = plan_graph(graph, 12, time_limit_s=2)
    assert schedule.recompute_ms == pytest.approx(9)
    assert schedule.overhead_bound * graph.plain_ms == pytest.approx(9, rel=1e-3)
