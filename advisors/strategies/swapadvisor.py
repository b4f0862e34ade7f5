"""SwapAdvisor (Huang, Jin, Li, ASPLOS 2020): genetic search over a pool of size classes, with Belady eviction as the planner inside.

Rule: a chromosome fixes what the deterministic swap planner is free to choose, here which tensor lies in which class of the pool and how
many slots each class has (`size_classes`); the planner walks the ops, and where a class is full evicts the tensor of it whose
next use is furthest. It leaves as soon as its last use before has ended; fitness is the judged step time. O(156 plans).
Differs: the order of the ops, the chromosome's other part, is the script's or the graph's own. Classes say what leaves, not where it
lies: PyTorch's allocator gives every tensor its place, and a graph has no addresses.
On profiles only what autograd saves lies in the pool, and a tensor comes back at the last moment that hides its copy, not as early as
memory allows: the link is a queue, in which early ones hold up those needed first. On graphs it comes back as early as memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopt.advisors.clock import OutOfTime, now
from memopt.advisors.graphs.executors.swap_executor import (
    CannotHold,
    as_soon_as_possible,
    best_walk,
    hold,
    idle_trips,
    just_in_time,
    pool_of_trips,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.registry import A_LINK, SWAPS, strategy
from memopt.advisors.size_classes import Pool, Tensor

swapadvisor = strategy(
    "swapadvisor",
    paper="Huang et al. 2020, SwapAdvisor: Push Deep Learning Beyond the GPU Memory Limit via Smart Swapping",
    needs=A_LINK,
    allows=SWAPS,
)


@swapadvisor.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """What the genetic search finds."""
    able = swappable(problem)
    limited = problem.limited(now() + problem.seconds_left)

    def away(problem: Problem, leaving: list[int]) -> Decisions:
        swaps = {able[number].storage: swap_of(able[number]) for number in leaving}
        return place_prefetches(problem, swaps)

    def rate(leaving: list[int]) -> tuple[float, float]:
        timeline = limited.run(away(limited, leaving))
        return max(0, timeline.peak_bytes - problem.target_bytes), timeline.step_ms

    yield away(problem, pool_of(problem, able).evolve(rate))


def pool_of(problem: Problem, able: list[Candidate]) -> Pool:
    """The pool in which `able` lie."""
    tensors = [
        Tensor(c.saved.size_bytes, slice(max(0, int(problem.view.birth[c.storage])), c.saved.release + 1), c.away)
        for c in able
    ]  # fmt: skip
    return Pool(tensors, problem.plain.high_bytes, problem.target_bytes)


@swapadvisor.graphs
def on_graph(problem: GraphProblem) -> Answer:
    """SwapAdvisor (ASPLOS'20): genetic search over size classes, Belady eviction, earliest way back."""
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

    chosen = [trips[number] for number in pool_of_trips(problem, runs, trips).evolve(rate)]
    return best_walk(problem, [(runs, chosen)], [as_soon_as_possible, just_in_time])
