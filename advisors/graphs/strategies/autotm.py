"""AutoTM (Hildebrand et al., ASPLOS'20) on a plain graph.

Rule: an integer program over placements with synchronous and asynchronous moves, capacity at every kernel, and the sum over kernels of
max(kernel time, moves overlapped with it) as objective. What differs: kernels never run from the slow tier, so each tensor has one choice
(its longest idle time is spent away or not); moves overlap with the kernels between leaving and the middle of the absence, and back.
HiGHS; one binary per idle tensor (the largest 400). Needs `highspy`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.executors.swap_executor import (
    Trip,
    Walk,
    as_soon_as_possible,
    best_walk,
    idle_trips,
    just_in_time,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem, infeasible
from memopt.advisors.graphs.runs import plain_runs
from memopt.advisors.program import new_highs

MOST_TENSORS = 400
MOST_ROWS = 300


def autotm(problem: GraphProblem) -> Answer:
    """AutoTM (ASPLOS'20): integer program over what is away when, moves overlapped with kernels (needs highspy)."""
    runs = plain_runs(problem.graph)
    if not problem.may_swap:
        return best_walk(problem, [], [])
    trips = sorted(
        idle_trips(problem.graph, runs), key=lambda trip: -int(problem.graph.tensor_bytes[trip.tensor])
    )
    least = int(problem.graph.tensor_bytes.max(initial=1)) // 100_000
    trips = [trip for trip in trips[:MOST_TENSORS] if int(problem.graph.tensor_bytes[trip.tensor]) > least]
    walk = Walk(problem, runs, [])
    if int(walk.memory.max()) <= problem.budget_bytes:
        return best_walk(problem, [], [])
    chosen = solve(problem, walk, trips)
    if chosen is None:
        raise infeasible(problem, int(Walk(problem, runs, trips).memory.max()))
    return best_walk(problem, [(runs, chosen)], [just_in_time, as_soon_as_possible])


def solve(problem: GraphProblem, walk: Walk, trips: list[Trip]) -> list[Trip] | None:
    """The trips that the program picks; None when it is infeasible."""
    highs = new_highs(max(0.5, problem.until - now()))
    away = [highs.addBinary() for _ in trips]
    over = np.flatnonzero(walk.memory > problem.budget_bytes)
    scale = float(max(1, int(walk.memory.max())))
    for position in over[np.unique(np.linspace(0, len(over) - 1, MOST_ROWS).astype(np.int64))].tolist():
        terms = [
            x * (walk.size[t.tensor] / scale)
            for x, t in zip(away, trips, strict=True)
            if t.leave < position < t.need
        ]
        if not terms:
            return None
        highs.addConstr(
            sum(terms[1:], terms[0]) >= (int(walk.memory[position]) - problem.budget_bytes) / scale
        )
    cost = _stalls(highs, walk, trips, away)
    highs.minimize(cost)
    values = highs.getSolution().col_value
    if highs.getInfo().primal_solution_status != 2:
        return None
    return [trip for trip, value in zip(trips, values, strict=False) if value > 0.5]


def _stalls(highs: Any, walk: Walk, trips: list[Trip], away: list[Any]) -> Any:
    """Time by which the moves of any prefix (out) or suffix (back) exceed the kernels that they overlap with."""
    end = float(walk.clock[-1])
    out_stall, in_stall = highs.addVariable(lb=0), highs.addVariable(lb=0)
    for at in sorted({trip.need for trip in trips})[::20]:
        moved = [x * walk.out_ms(t.tensor) for x, t in zip(away, trips, strict=True) if t.need <= at]
        highs.addConstr(sum(moved[1:], moved[0]) - out_stall <= float(walk.clock[at]))
    for at in sorted({trip.leave for trip in trips})[::20]:
        moved = [x * walk.in_ms(t.tensor) for x, t in zip(away, trips, strict=True) if t.leave >= at]
        highs.addConstr(sum(moved[1:], moved[0]) - in_stall <= end - float(walk.clock[at]))
    every = [x * (1e-4 * walk.out_ms(trip.tensor)) for x, trip in zip(away, trips, strict=True)]
    return sum(every, out_stall + in_stall)
