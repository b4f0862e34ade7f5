"""What no plan can go below is told truly: exact on tiny graphs, and near the floor where only reruns without end reach it."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from memopt.advisors.clock import reading
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.graphs.runs import floor_bytes, peak_of_runs, rerun_ms
from memopt.advisors.graphs.search.least import least_memory, lowest_peak
from memopt.advisors.graphs.search.tiny import optimum
from memopt.errors import BudgetInfeasible
from tests.advisors.graphs import schedule_checker as checker
from tests.advisors.graphs.planned_graphs import graph_of, plan_and_check


def tiny(seed: int) -> dict[str, Any]:
    """A graph of up to six ops, some of which run once only."""
    rnd = random.Random(seed)
    tensors: list[dict[str, Any]] = []
    ops: list[dict[str, Any]] = []
    for _ in range(rnd.randint(3, 6)):
        reads = rnd.sample(range(len(tensors)), min(len(tensors), rnd.randint(0, 3)))
        tensors.append({"id": len(tensors), "bytes": rnd.randint(0, 6)})
        ops.append(
            {
                "ms": rnd.randint(0, 8) / 4,
                "reads": reads,
                "writes": [len(tensors) - 1],
                "workspace_bytes": rnd.choice((0, 0, 2)),
                "replayable": rnd.random() < 0.8,
            }
        )
    keep = rnd.sample(range(len(tensors)), 1)
    return {"schema": "memopt.graph/1", "name": "tiny", "tensors": tensors, "ops": ops, "keep": keep}


def test_a_few_ops_are_planned_exactly() -> None:
    planned = refused = 0
    for seed in range(120):
        plain = tiny(seed)
        graph = graph_of(plain)
        floor, peak = floor_bytes(graph, swap=False)[0], unplanned_peak(graph)
        for budget in {max(floor - 1, 1), *range(max(floor, 1), peak)}:
            best = checker.cheapest(plain, budget, 12)
            if best is None:
                with pytest.raises(BudgetInfeasible) as caught:
                    plan_graph(graph, budget, time_limit_s=0.1)
                found = optimum(graph, None)
                assert found is not None
                assert caught.value.min_peak_bytes == peak_of_runs(graph, found.runs) > budget
                refused += 1
            else:
                found = optimum(graph, budget)
                assert found is not None
                assert rerun_ms(graph, found.runs) == pytest.approx(best)
                planned += 1
    assert min(planned, refused) > 10


def quadratic_chain(length: int) -> dict[str, Any]:
    """Backward reads two neighbours and a gradient: all of 100 bytes, so that four fit in the floor."""
    tensors = [{"id": i, "bytes": 100} for i in range(2 * length)]
    ops: list[dict[str, Any]] = [
        {"ms": 1, "reads": [i - 1] if i else [], "writes": [i]} for i in range(length)
    ]
    for made, i in enumerate(range(length - 1, -1, -1)):
        gradient = [length + made - 1] if made else []
        ops.append(
            {"ms": 1, "reads": [t for t in (i - 1, i) if t >= 0] + gradient, "writes": [length + made]}
        )
    return {
        "schema": "memopt.graph/1", "name": "chain", "tensors": tensors, "ops": ops, "keep": [2 * length - 1]
    }  # fmt: skip


def test_a_chain_is_planned_at_its_floor() -> None:
    """Every activation is made again from the beginning: in quadratic time, but within 400 bytes of 10,100."""
    plain = quadratic_chain(100)
    graph = graph_of(plain)
    assert floor_bytes(graph, swap=False)[0] == 400
    with reading(time.process_time):
        overhead = plan_and_check(plain, 400, time_limit_s=1)
    assert 5 < overhead < 50
    with pytest.raises(BudgetInfeasible) as caught, reading(time.process_time):
        plan_graph(graph, 399, time_limit_s=2)
    assert caught.value.min_peak_bytes == 400


def tree(leaves: int) -> dict[str, Any]:
    """A sum of pairs of sums of pairs, level by level, of 8 bytes each."""
    ops: list[dict[str, Any]] = [{"ms": 1, "reads": [], "writes": [i]} for i in range(leaves)]
    level = list(range(leaves))
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2], strict=True))
        level = [len(ops) + i for i in range(len(pairs))]
        ops += [{"ms": 1, "reads": list(pair), "writes": [i]} for pair, i in zip(pairs, level, strict=True)]
    tensors = [{"id": i, "bytes": 8} for i in range(len(ops))]
    return {"schema": "memopt.graph/1", "name": "tree", "tensors": tensors, "ops": ops, "keep": level}


def test_a_tree_is_made_again_depth_first() -> None:
    """A tensor waits at each of its 7 levels, one is made: 9 tensors at most, of 64 without a plan."""
    plain = tree(64)
    graph = graph_of(plain)
    assert peak_of_runs(graph, least_memory(graph, 8 * 9)) <= 8 * 9
    runs = lowest_peak(graph, floor_bytes(graph, swap=False)[0], unplanned_peak(graph))
    assert peak_of_runs(graph, runs) <= 8 * 9
    with reading(time.process_time):
        plan_and_check(plain, 8 * 9, time_limit_s=1)
