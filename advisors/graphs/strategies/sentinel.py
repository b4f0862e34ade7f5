"""Sentinel (Ren et al., HPCA'21) on a plain graph.

Rule: tensors that live within one interval of k ops are never moved; long-lived ones leave at the end of the interval of their last use and
come back during the interval before the one that needs them; k by enumeration (least exposed time). What differs: no page
grouping, since the unit here is the storage. O(log(ops) x walks).
"""

from __future__ import annotations

from memopt.advisors.graphs.executors.swap_executor import Prefetch, Trip, Walk, best_walk, idle_trips
from memopt.advisors.graphs.problem import Answer, GraphProblem, infeasible
from memopt.advisors.graphs.runs import plain_runs
from memopt.errors import BudgetInfeasible


def sentinel(problem: GraphProblem) -> Answer:
    """Sentinel (HPCA'21): long-lived tensors migrate by intervals; the best interval by enumeration."""
    runs = plain_runs(problem.graph)
    if not problem.may_swap:
        return best_walk(problem, [], [])
    best: tuple[float, Answer] | None = None
    smallest = 2**62
    interval = 1
    while interval < max(2, len(runs) // 4):
        trips = [
            Trip(trip.tensor, min(end_of(trip.leave, interval), trip.need - 1), trip.need)
            for trip in idle_trips(problem.graph, runs)
            if trip.need // interval - trip.leave // interval >= 2
        ]
        try:
            answer = best_walk(problem, [(runs, trips)], [interval_before(interval)])
        except BudgetInfeasible as failure:
            smallest = min(smallest, failure.min_peak_bytes)
        else:
            overhead = problem.replay(answer.steps).overhead
            if best is None or overhead < best[0]:
                best = (overhead, answer)
        interval *= 2
    if best is None:
        raise (
            infeasible(problem, smallest)
            if smallest < 2**62
            else infeasible(problem, int(Walk(problem, runs, []).memory.max()))
        )
    return best[1]


def end_of(position: int, interval: int) -> int:
    """Last run of the interval of `position`."""
    return (position // interval + 1) * interval - 1


def interval_before(interval: int) -> Prefetch:
    """The start of the interval before the one that needs the tensor."""

    def rule(walk: Walk, trip: Trip) -> int:
        return max(0, trip.need // interval - 1) * interval

    return rule
