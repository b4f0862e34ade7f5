"""Planning a graph that is written as plain JSON, with the independent checker as judge; chains to plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memopt.advisors.graphs.graph import Graph, decode_graph
from memopt.advisors.graphs.plan import plan_graph
from memopt.advisors.graphs.schedule import encode_schedule
from memopt.errors import BudgetInfeasible
from tests.advisors.graphs import schedule_checker as checker


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


def tried(plain: dict[str, Any], budget: int, **options: Any) -> float:
    """Checked overhead, or infinity."""
    try:
        return plan_and_check(plain, budget, **options)
    except BudgetInfeasible:
        return float("inf")


def chain(length: int) -> dict[str, Any]:
    """A forward chain and its backward: f(i) makes a(i); b(i) reads a(i-1), a(i) and the gradient."""
    tensors = [{"id": i, "bytes": 4 + i % 3} for i in range(length)]
    tensors += [{"id": 100 + i, "bytes": 4} for i in range(length)]
    ops: list[dict[str, Any]] = [
        {"name": f"f{i}", "ms": 1 + i % 4, "reads": [i - 1] if i else [], "writes": [i]}
        for i in range(length)
    ]
    for i in range(length - 1, -1, -1):
        reads = [t for t in (i - 1, i) if t >= 0] + ([101 + i] if i + 1 < length else [])
        ops.append({"name": f"b{i}", "ms": 2, "reads": reads, "writes": [100 + i]})
    return {"schema": "memopt.graph/1", "name": "chain", "tensors": tensors, "ops": ops, "keep": [100]}


def unit_chain(length: int) -> dict[str, Any]:
    """f(i) makes a(i) from a(i-1); b(i) reads a(i) and the gradient. All take 1 ms and 1 byte."""
    tensors = [{"id": i, "bytes": 1} for i in range(2 * length)]
    rows: list[dict[str, Any]] = [
        {"ms": 1, "reads": [i - 1] if i else [], "writes": [i]} for i in range(length)
    ]
    for i in range(length - 1, -1, -1):
        grad = 2 * length - 1 - i
        rows.append({"ms": 1, "reads": [i] + ([grad - 1] if i < length - 1 else []), "writes": [grad]})
    return {"schema": "memopt.graph/1", "tensors": tensors, "ops": rows, "keep": [2 * length - 1]}
