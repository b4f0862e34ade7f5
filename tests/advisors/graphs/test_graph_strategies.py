"""Single strategies on plain graphs: what each decides on chains, and that all bear graphs that are hardly any."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from memopt.advisors.graphs.executors.engine import Engine
from memopt.advisors.graphs.executors.scores import SCORES, Neighbours
from memopt.advisors.graphs.executors.segments import Forward
from memopt.advisors.graphs.executors.swap_executor import Walk
from memopt.advisors.graphs.graph import FloatColumn, IntColumn, decode_graph
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import plain_runs
from memopt.advisors.registry import graph_strategies
from memopt.advisors.strategies import checkmate
from memopt.advisors.strategies.capuchin import in_order
from memopt.errors import BudgetInfeasible, NotPossibleHere
from tests.advisors.graphs.planned_graphs import chain, graph_of, plan_and_check, tried, unit_chain
from tests.support.training_graphs.families import branches


def test_checkmate_and_auto_agree_on_a_small_graph() -> None:
    pytest.importorskip("highspy")
    plain = chain(8)
    graph = graph_of(plain)
    for share in (0.9, 0.7, 0.55):
        budget = int(share * unplanned_peak(graph))
        best = plan_graph(graph, budget, strategy="checkmate", time_limit_s=10)
        assert best.overhead - best.overhead_bound < 0.01
        assert plan_and_check(plain, budget, time_limit_s=0.3) <= best.overhead + 0.005


def test_checkmate_rounds_its_relaxation_where_the_graph_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 120 activations, 1 byte and 1 ms each, at least 61 must go in 60 bytes, and each costs a rerun."""
    pytest.importorskip("highspy")
    plain = unit_chain(120)
    graph = graph_of(plain)
    assert unplanned_peak(graph) == 121
    best = plan_graph(graph, 60, strategy="checkmate", time_limit_s=60)
    assert 61 <= best.recompute_ms < 2 * 61
    assert 61 - 1e-3 <= best.overhead_bound * graph.plain_ms <= best.recompute_ms
    with pytest.raises(BudgetInfeasible):
        plan_graph(graph, 2, strategy="checkmate", time_limit_s=1)
    monkeypatch.setattr(checkmate, "MOST_ROUNDED", 200)
    with pytest.raises(NotPossibleHere, match="240 ops are too many"):
        plan_graph(graph, 60, strategy="checkmate")


DEGENERATE: dict[str, dict[str, Any]] = {
    "nothing": {"tensors": [], "ops": []},
    "no tensors": {
        "tensors": [],
        "ops": [
            {"ms": 1, "reads": [], "writes": []},
            {"ms": 0, "reads": [], "writes": [], "workspace_bytes": 7},
        ],
    },
    "one op": {
        "tensors": [{"id": 0, "bytes": 5}],
        "ops": [{"ms": 1, "reads": [], "writes": [0]}],
        "keep": [0],
    },
    "residents only": {"tensors": [{"id": 0, "bytes": 5, "resident": True}], "ops": [], "keep": [0]},
}


@pytest.mark.parametrize("strategy", graph_strategies())
@pytest.mark.parametrize("name", [*DEGENERATE, "no bytes", "no time"])
def test_degenerate_graphs(name: str, strategy: str) -> None:
    """Each strategy gives a plan or a refusal for graphs that are hardly any, with a link and without."""
    if name in DEGENERATE:
        plain = {"schema": "memopt.graph/1", "name": name, **DEGENERATE[name]}
    else:
        plain = chain(6)
        for row in plain["tensors"] if name == "no bytes" else plain["ops"]:
            row["bytes" if name == "no bytes" else "ms"] = 0
    peak = unplanned_peak(graph_of(plain))
    for rate in (0.0, 1.0):
        options = {"strategy": strategy, "out_gbps": rate, "in_gbps": rate, "time_limit_s": 0.3}
        assert plan_and_check(plain, peak, **options) == 0
        for budget in {peak - 1, peak // 2} - {peak}:
            if budget >= 0:
                tried(plain, budget, **options)


def test_other_names_and_what_only_profiles_have() -> None:
    plain = chain(8)
    graph = graph_of(plain)
    assert plan_graph(graph, 40, strategy="megengine").strategy == "dtr-megengine"
    assert plan_graph(graph, 43, strategy="vdnn-dyn").strategy == "vdnn"
    with pytest.raises(NotPossibleHere, match="gist plans profiles only"):
        plan_graph(graph, 40, strategy="gist")


def test_rotor_on_a_chain() -> None:
    """16 layers of 1 byte and 1 ms, 17 bytes without a plan. A stretch of k layers keeps what enters and what leaves it, so it saves k - 1
    bytes for k reruns: one byte is 2, eight are two stretches of 5; below, stretches nest, and some layers run a third time."""
    graph = graph_of(unit_chain(16))
    assert unplanned_peak(graph) == 17
    found = {budget: plan_graph(graph, budget, strategy="rotor").recompute_ms for budget in (16, 9, 6)}
    assert found == {16: 2, 9: 10, 6: 17}


def test_rotor_on_a_deep_chain() -> None:
    """In 40 stages of 140 layers, 8 bytes are the least."""
    graph = graph_of(unit_chain(140))
    assert plan_graph(graph, 7, strategy="rotor").peak_bytes <= 7
    assert plan_graph(graph, 10, strategy="rotor").recompute_ms <= 346


def test_capuchin_takes_the_cheaper_of_a_swap_that_is_seen_and_a_recomputation() -> None:
    """At 100 bytes per ms all three swaps hide, at a tenth of a byte none; swaps alone at half a byte are waited for."""
    plain = chain(8)
    graph = graph_of(plain)
    budget = int(0.7 * unplanned_peak(graph))
    fast = plan_graph(graph, budget, strategy="capuchin", out_gbps=1e-4, in_gbps=1e-4)
    slow = plan_graph(graph, budget, strategy="capuchin", out_gbps=1e-7, in_gbps=1e-7)
    only = frozenset({"swap"})
    waiting = plan_graph(graph, budget, strategy="capuchin", out_gbps=5e-7, in_gbps=5e-7, allow=only)
    figures = [
        (plan.swaps, plan.reruns, plan.recompute_ms, plan.exposed_ms) for plan in (fast, slow, waiting)
    ]
    assert figures == [(3, 0, 0, 0), (0, 3, 5, 0), (3, 0, 0, pytest.approx(27))]


def test_capuchin_prices_no_more_candidates_than_there_is_time_for() -> None:
    graph = graph_of(chain(8))
    budget = int(0.7 * unplanned_peak(graph))
    counts = []
    for until in (math.inf, 0.0):
        problem = GraphProblem(graph=graph, budget_bytes=budget, until=until)
        counts.append(len(in_order(problem, Walk(problem, plain_runs(graph), []), Forward(graph))))
    assert counts[0] > 0
    assert counts[1] == 0


@pytest.mark.parametrize("name", ["msps", "dtr", "dtr-eqclass", "dtr-megengine", "next-use"])
def test_the_cost_around_a_tensor_is_what_it_is_when_reckoned_anew(name: str) -> None:
    scorings = 0

    class Watched(SCORES[name]):  # type: ignore[misc]
        def neighbourhood(self: Neighbours, candidates: IntColumn) -> FloatColumn:
            nonlocal scorings
            scorings += 1
            found = super().neighbourhood(candidates)  # type: ignore[misc]
            anew = [self.region_cost(tensor) for tensor in candidates.tolist()]
            assert found.tolist() == pytest.approx(anew, rel=1e-12)  # added up in another order
            return found  # type: ignore[no-any-return]

    graph = decode_graph(msgspec.json.encode(branches(6, 3, 2)))
    runs = Engine(graph, unplanned_peak(graph) // 2, Watched()).plan()
    assert scorings > 10
    assert len(runs) > graph.op_count
