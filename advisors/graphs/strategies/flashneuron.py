"""FlashNeuron (Bae et al., FAST'21), phase 1, and TFLMS (Le et al., 2018) on a plain graph.

FlashNeuron: linear selection, saved tensors in the order of their production until the rest fits. Phase 2 (by compressibility) needs values, which a
graph does not have. TFLMS: every edge longer than a threshold (in ops) leaves and comes back within a window before its
consumer; the largest threshold that fits, by bisection. O(trips log ops).
"""

from __future__ import annotations

from memopt.advisors.graphs.executors.swap_executor import (
    Trip,
    Walk,
    ahead,
    best_walk,
    idle_trips,
    just_in_time,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs


def flashneuron(problem: GraphProblem) -> Answer:
    """FlashNeuron (FAST'21), linear selection: saved tensors in order of production until the rest fits."""
    runs = plain_runs(problem.graph)
    if not problem.may_swap:
        return best_walk(problem, [], [])
    memory = Walk(problem, runs, []).memory
    chosen: list[Trip] = []
    for trip in sorted(
        idle_trips(problem.graph, runs), key=lambda trip: int(problem.graph.producer[trip.tensor])
    ):
        span = memory[trip.leave + 1 : trip.need]
        if int(memory.max()) <= problem.budget_bytes:
            break
        if int(span.max(initial=0)) > problem.budget_bytes:
            span -= int(problem.graph.tensor_bytes[trip.tensor])
            chosen.append(trip)
    return best_walk(problem, [(runs, chosen)], [just_in_time])


def tflms(problem: GraphProblem) -> Answer:
    """TFLMS (2018): edges longer than a threshold leave, and come back within a window before their consumer."""
    runs = plain_runs(problem.graph)
    if not problem.may_swap:
        return best_walk(problem, [], [])
    trips = idle_trips(problem.graph, runs)
    low, high = 1, len(runs)
    while low < high:
        middle = (low + high + 1) // 2
        if int(Walk(problem, runs, longer(trips, middle)).memory.max()) <= problem.budget_bytes:
            low = middle
        else:
            high = middle - 1
    choices = [
        (runs, longer(trips, threshold)) for threshold in sorted({low, max(1, low // 2), 1}, reverse=True)
    ]
    return best_walk(problem, choices, [ahead(4), ahead(16)])


def longer(trips: list[Trip], threshold: int) -> list[Trip]:
    """Trips over more than `threshold` runs."""
    return [trip for trip in trips if trip.need - trip.leave > threshold]
