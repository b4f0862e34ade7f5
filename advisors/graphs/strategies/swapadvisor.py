"""SwapAdvisor (Huang et al., ASPLOS'20) on a plain graph.

Rule: a genetic algorithm over chromosomes that a deterministic swap planner turns into a schedule: memory is a pool of size classes
(`advisors.size_classes`); where a class is full, the tensor of it whose next use is furthest leaves (Belady), and comes back
as early as memory allows. O(156 schedules), or until the time limit. What differs: the op order is fixed by the exchange form, so a
chromosome is the classes and their slots alone; the form has no addresses, so a class says what leaves, not where it lies.
"""

from __future__ import annotations

from memopt.advisors.clock import OutOfTime, now
from memopt.advisors.graphs.executors.swap_executor import (
    CannotHold,
    Trip,
    Walk,
    as_soon_as_possible,
    best_walk,
    hold,
    idle_trips,
    just_in_time,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import lifetimes, plain_runs
from memopt.advisors.size_classes import Pool, Tensor


def swapadvisor(problem: GraphProblem) -> Answer:
    """SwapAdvisor (ASPLOS'20): genetic search over size classes, Belady eviction, earliest way back."""
    if not problem.may_swap:
        return best_walk(problem, [], [])
    runs = plain_runs(problem.graph)
    trips = idle_trips(problem.graph, runs)

    def rate(leaving: list[int]) -> tuple[float, float]:
        if now() > problem.until:
            raise OutOfTime
        try:
            steps = hold(problem, runs, [trips[number] for number in leaving], as_soon_as_possible)
        except CannotHold as failure:
            return float(failure.peak_bytes), 0.0
        return 0.0, problem.replay(steps).overhead

    chosen = [trips[number] for number in pool_of(problem, runs, trips).evolve(rate)]
    return best_walk(problem, [(runs, chosen)], [as_soon_as_possible, just_in_time])


def belady(problem: GraphProblem, runs: list[int], trips: list[Trip]) -> list[Trip]:
    """Trips such that the budget holds: at each run that is short, the idle tensor with the furthest next use leaves."""
    return [trips[number] for number in pool_of(problem, runs, trips).leaving()]


def pool_of(problem: GraphProblem, runs: list[int], trips: list[Trip]) -> Pool:
    """The pool in which the tensors of `trips` lie, each op run once."""
    first, last = (column.tolist() for column in lifetimes(problem.graph))
    walk = Walk(problem, runs, [])
    tensors = [
        Tensor(
            walk.size[trip.tensor],
            slice(max(0, first[trip.tensor]), max(trip.need, last[trip.tensor]) + 1),
            slice(trip.leave + 1, trip.need),
        )
        for trip in trips
    ]
    return Pool(tensors, walk.memory, problem.budget_bytes)
