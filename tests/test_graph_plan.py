"""Plans of every graph strategy, judged by a checker that shares no code with memopt, and against brute force."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memopt.advisors.graph import Graph, decode_graph
from memopt.advisors.graph_plan import GRAPH_STRATEGIES, plan_graph, unplanned_peak
from memopt.advisors.graph_runs import floor_bytes
from memopt.advisors.schedule import encode_schedule
from memopt.errors import BudgetInfeasible, UsageError


def load(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


checker = load("schedule_checker", "schedule_checker.py")
shapes = load("graph_shapes", "../benchmarks/graphs.py")


def graph_of(plain: dict[str, Any]) -> Graph:
    return decode_graph(json.dumps(plain).encode())


def plan_and_check(plain: dict[str, Any], budget: int, **options: Any) -> float:
    graph = graph_of(plain)
    schedule = plan_graph(graph, budget, **options)
    written = json.loads(encode_schedule(schedule, graph))
    found = checker.check(plain, written)
    assert found["overhead"] == pytest.approx(schedule.overhead, abs=1e-9)
    assert found["peak_bytes"] == schedule.peak_bytes <= budget
    return float(found["overhead"])


@st.composite
def graphs(draw: st.DrawFn, most_ops: int = 7) -> dict[str, Any]:
    """Small graphs with residents, several outputs, workspaces, unused tensors and ops that run once."""
    residents = draw(st.integers(0, 2))
    tensors: list[dict[str, Any]] = [
        {"id": 100 + i, "bytes": draw(st.integers(0, 3)), "resident": True} for i in range(residents)
    ]
    ops: list[dict[str, Any]] = []
    made: list[int] = []
    for position in range(draw(st.integers(1, most_ops))):
        known = made + [100 + i for i in range(residents)]
        reads = draw(st.lists(st.sampled_from(known), max_size=3, unique=True)) if known else []
        writes = []
        for _ in range(draw(st.sampled_from((1, 1, 1, 2, 0)))):
            writes.append(len(made) + len(writes))
        tensors += [{"id": t, "bytes": draw(st.integers(0, 6))} for t in writes]
        made += writes
        ops.append(
            {
                "name": f"op{position}",
                "ms": draw(st.integers(0, 8)) / 4,
                "reads": reads,
                "writes": writes,
                "workspace_bytes": draw(st.sampled_from((0, 0, 2))),
                "replayable": draw(st.sampled_from((True, True, True, False))),
            }
        )
    keep = draw(st.lists(st.sampled_from(made), max_size=2, unique=True)) if made else []
    return {"schema": "memopt.graph/1", "name": "random", "tensors": tensors, "ops": ops, "keep": keep}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plain=graphs(), share=st.floats(0.0, 1.0), strategy=st.sampled_from(sorted(GRAPH_STRATEGIES)))
def test_every_plan_of_every_strategy_is_valid(plain: dict[str, Any], share: float, strategy: str) -> None:
    graph = graph_of(plain)
    peak = unplanned_peak(graph)
    assert peak == checker.unplanned(plain)
    floor, _ = floor_bytes(graph, swap=False)
    budget = int(floor + share * (peak - floor))
    try:
        overhead = plan_and_check(plain, budget, strategy=strategy, time_limit_s=0.1)
    except BudgetInfeasible as error:
        assert error.min_peak_bytes > budget
        return
    assert overhead >= 0
    if budget >= peak:
        assert overhead == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plain=graphs(most_ops=6), share=st.floats(0.0, 1.0))
def test_auto_against_brute_force(plain: dict[str, Any], share: float) -> None:
    graph = graph_of(plain)
    peak = unplanned_peak(graph)
    floor, _ = floor_bytes(graph, swap=False)
    budget = int(floor + share * (peak - floor))
    best = checker.cheapest(plain, budget, 12)
    total = sum(op["ms"] for op in plain["ops"])
    try:
        overhead = plan_and_check(plain, budget, time_limit_s=0.2)
    except BudgetInfeasible:
        assert best is None
        return
    if best is not None and total:
        assert overhead >= best / total - 1e-9
        assert overhead <= best / total + 0.005


@pytest.mark.parametrize("name", ["unet", "mobilenet"])
@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_auto_is_at_least_as_good_as_every_other_strategy(name: str, share: float) -> None:
    plain = json.loads(msgspec.json.encode(shapes.GRAPHS[name]()))
    graph = graph_of(plain)
    budget = int(share * unplanned_peak(graph))
    others: dict[str, float] = {}
    for strategy in GRAPH_STRATEGIES:
        if strategy != "auto":
            try:
                others[strategy] = plan_and_check(plain, budget, strategy=strategy, time_limit_s=2)
            except BudgetInfeasible as error:
                assert error.min_peak_bytes > budget
    overhead = plan_and_check(plain, budget, time_limit_s=2)
    assert overhead <= min(others.values(), default=9.0) + 1e-9


def test_budget_below_the_floor_names_the_op() -> None:
    plain = json.loads(msgspec.json.encode(shapes.GRAPHS["vgg16"]()))
    graph = graph_of(plain)
    floor, op = floor_bytes(graph, swap=False)
    with pytest.raises(BudgetInfeasible) as caught:
        plan_graph(graph, floor - 1, time_limit_s=0.5)
    assert caught.value.min_peak_bytes >= floor
    assert graph.op_label(op) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "magic"},
        {"allow": frozenset({"prayer"})},
        {"out_gbps": float("nan")},
        {"in_gbps": -1.0},
        {"time_limit_s": 0.0},
        {"time_limit_s": float("nan")},
    ],
)
def test_arguments_that_cannot_be_meant(options: dict[str, Any]) -> None:
    graph = graph_of({"schema": "memopt.graph/1", "tensors": [], "ops": []})
    with pytest.raises(UsageError):
        plan_graph(graph, 100, **options)
