"""Plans to start the graph search from: what every published strategy without copies makes of the graph.

Those that take milliseconds a graph of `FEW` ops are all asked there, however little time there is, so that `auto` is never worse
than any of them; on larger graphs each has half a second at least, the simplest first, as long as there is any time at all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.exact import MOST_OPS
from memopt.advisors.graphs.bounds.rounding import rounded_plans
from memopt.advisors.graphs.executors.engine import THRASH, Engine, Stuck
from memopt.advisors.graphs.executors.scores import SCORES
from memopt.advisors.graphs.executors.segments import (
    Forward,
    cheapest_dropped,
    checkpoints,
    greedy_cuts,
    runs_keeping,
    sqrt_cuts,
)
from memopt.advisors.graphs.graph import Graph
from memopt.advisors.graphs.problem import RECOMPUTE, GraphProblem
from memopt.advisors.graphs.runs import peak_of_runs, plain_peak, rerun_ms
from memopt.advisors.graphs.schedule import RUN
from memopt.advisors.registry import graph_strategies
from memopt.errors import BudgetInfeasible

PORTFOLIO = ("dtr-local", "size", "lru", "next-use", "dtr", "dtr-eqclass", "dtr-megengine", "msps", "belady")
"""The quickest first; on graphs of thousands of ops Rotor's turn is before `dtr`."""
IN_ANY_CASE_S = 0.5
"""So long each of them, Rotor and Capuchin have there, however late it is."""
LOOSER = 1.25
"""Of the budget: what a rule plans for a larger one may be mended to fit."""
FEW = 1000
"""On graphs of so many ops every strategy takes milliseconds."""
LARGE = 8000
"""In graphs with more ops, dropping a share of what is cheap finds a first plan sooner than segments do, and what planned parts leave to
gain is not worth the time."""
SEGMENTS, ROUNDED = 0.3, 0.4
"""Of the time."""
BEST_ROUNDED = 6
"""Rounded relaxations are much alike."""


def first_plan(problem: GraphProblem, until: float) -> list[int]:
    """A run sequence that meets the budget, the first of a few quick ones; empty where none of them does, or recomputing is not allowed."""
    if not problem.may_recompute:
        return []
    for runs in _quick_plans(problem, until):
        if peak_of_runs(problem.graph, runs) <= problem.budget_bytes:
            return runs
        if now() > until:
            break
    return []


def _quick_plans(problem: GraphProblem, until: float) -> Iterator[list[int]]:
    """Run sequences, soonest first, of which one may be valid: what is cheap to drop, a few segments, the online rules."""
    graph, budget_bytes = problem.graph, problem.budget_bytes
    forward = Forward(graph)
    needed = plain_peak(graph) - budget_bytes
    for plans in (cheapest_dropped,) * (graph.op_count > LARGE) + (few_segments,):
        for keep in plans(forward):
            if forward.dropped_bytes(keep) >= needed:
                yield runs_keeping(forward, keep)
    for name in PORTFOLIO:
        if name == "dtr" and graph.op_count > FEW:
            yield from rotor_plans(replace(problem, until=until))
        if runs := ruled(graph, budget_bytes, name, until):
            yield runs


def few_segments(forward: Forward) -> list[set[int]]:
    """For a first plan; the finest of them only where the graph is large."""
    return greedy_cuts(forward, 6)[forward.graph.op_count <= LARGE :]


def starts(problem: GraphProblem, until: float, most_ms: float = math.inf) -> list[list[int]]:
    """Run sequences of the strategies that only recompute: those that meet the budget, cheapest first; then the others. An online rule
    that reruns for longer than `most_ms`, or than another plan, is given up."""
    graph = problem.graph
    found: list[tuple[int, float, list[int]]] = []
    begin = now()
    every = graph.op_count <= FEW
    forward = Forward(graph)
    for keep in [checkpoints(forward), *sqrt_cuts(forward), *greedy_cuts(forward)]:
        found.append(_valued(graph, problem.budget_bytes, runs_keeping(forward, keep)))
        if now() - begin > SEGMENTS * (until - begin) and not every:
            break

    def end() -> float:
        return math.inf if every else min(problem.until, max(until, now() + IN_ANY_CASE_S))

    for name in PORTFOLIO:
        if name == "dtr" and not every:
            found.extend(
                _valued(graph, problem.budget_bytes, runs)
                for runs in rotor_plans(replace(problem, until=end()))
            )
        for budget_bytes in (problem.budget_bytes, int(LOOSER * problem.budget_bytes)):
            if now() > (end() if budget_bytes == problem.budget_bytes else until):
                break
            most_ms = min([most_ms, *(cost for over, cost, _ in found if not over)])
            if runs := ruled(graph, budget_bytes, name, end(), most_ms):
                found.append(_valued(graph, problem.budget_bytes, runs))
                break
            if most_ms < math.inf:
                break  # a plan is known, so one that does not meet the budget is of no use
    found.extend(_rounded(problem, now() + ROUNDED * (until - begin)))
    if now() < end():
        found.extend(_valued(graph, problem.budget_bytes, runs) for runs in _planned(problem, end()))
    return [runs for _, _, runs in sorted(found, key=lambda item: item[:2])]


def _rounded(problem: GraphProblem, until: float) -> list[tuple[int, float, list[int]]]:
    """The best of Checkmate's rounded relaxations, where there is a solver and the time."""
    graph = problem.graph
    if not find_spec("highspy") or graph.op_count > MOST_OPS or now() > until:
        return []
    plans = [_valued(graph, problem.budget_bytes, runs) for _, runs in rounded_plans(problem, until)]
    return sorted(plans, key=lambda item: item[:2])[:BEST_ROUNDED]


def _planned(problem: GraphProblem, until: float) -> Iterator[list[int]]:
    """Capuchin's run sequence without copies; on small graphs Rotor's for several amounts of memory."""
    every = problem.graph.op_count <= FEW
    alone = replace(problem, allow=frozenset({RECOMPUTE}), until=math.inf if every else until)
    with contextlib.suppress(BudgetInfeasible):
        yield [what for verb, what in graph_strategies()["capuchin"].answer(alone).steps if verb == RUN]
    if every:
        yield from rotor_plans(alone)


def ruled(graph: Graph, budget_bytes: int, name: str, until: float, most_ms: float = math.inf) -> list[int]:
    """The run sequence of one online rule; empty when it gets stuck, or reruns for longer than `most_ms`."""
    thrash = min(THRASH, 1.01 * most_ms / (graph.plain_ms or 1.0))
    try:
        return Engine(graph, budget_bytes, SCORES[name](), thrash=thrash, until=until).plan()
    except Stuck:
        return []


def rotor_plans(problem: GraphProblem) -> Iterable[list[int]]:
    """Rotor's run sequences for several amounts of memory."""
    rule = graph_strategies()["rotor"].runs
    return rule(problem) if rule else ()


def _valued(graph: Graph, budget_bytes: int, runs: list[int]) -> tuple[int, float, list[int]]:
    return max(0, peak_of_runs(graph, runs) - budget_bytes), rerun_ms(graph, runs), runs
