"""moDNN (Chen et al., DATE'18) on a plain graph.

Rule: start with everything that can leave leaving after its last forward use; keep tensors on the device again whenever the budget
allows, latest first; bring back at the earliest op from which memory holds. What differs: no sub-batches (they change the graph) and no
convolution algorithms. O(trips x ops).
"""

from __future__ import annotations

from memopt.advisors.graphs.executors.swap_executor import (
    Trip,
    Walk,
    as_soon_as_possible,
    best_walk,
    idle_trips,
    just_in_time,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs


def modnn(problem: GraphProblem) -> Answer:
    """moDNN (DATE'18): all leave, then the latest stay again while the budget holds."""
    runs = plain_runs(problem.graph)
    if not problem.may_swap:
        return best_walk(problem, [], [])
    return best_walk(problem, [(runs, kept_back(problem, runs))], [as_soon_as_possible, just_in_time])


def kept_back(problem: GraphProblem, runs: list[int]) -> list[Trip]:
    """The trips that remain when the latest to leave stay while the budget holds."""
    trips = idle_trips(problem.graph, runs)
    walk = Walk(problem, runs, trips)
    chosen: list[Trip] = []
    for trip in sorted(trips, key=lambda trip: trip.leave, reverse=True):
        span = walk.memory[trip.leave + 1 : trip.need]
        if int(span.max(initial=0)) + walk.size[trip.tensor] <= problem.budget_bytes:
            span += walk.size[trip.tensor]
        else:
            chosen.append(trip)
    return chosen[::-1]
