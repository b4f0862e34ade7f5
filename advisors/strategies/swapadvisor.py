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
from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.executors.swap_executor import (
    CannotHold,
    Copies,
    as_soon_as_possible,
    hold,
    just_in_time,
)
from memopt.advisors.profiles.picking import ProfileBoard
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import A_LINK, SWAPS, strategy
from memopt.advisors.size_classes import pool_of

swapadvisor = strategy(
    "swapadvisor",
    paper="Huang et al. 2020, SwapAdvisor: Push Deep Learning Beyond the GPU Memory Limit via Smart Swapping",
    needs=A_LINK,
    allows=SWAPS,
)


@swapadvisor.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """What the genetic search finds."""
    board = ProfileBoard(problem)
    limited = problem.limited(now() + problem.seconds_left)

    def away(problem: Problem, leaving: list[int]) -> Decisions:
        storages = [board.absences[number].storage for number in leaving]
        return place_prefetches(problem, {storage: board.swaps[storage] for storage in storages})

    def rate(leaving: list[int]) -> tuple[float, float]:
        timeline = limited.run(away(limited, leaving))
        return max(0, timeline.peak_bytes - problem.target_bytes), timeline.step_ms

    yield away(problem, pool_of(board).evolve(rate))


@swapadvisor.graph_trips
def on_graph(board: GraphBoard) -> Iterator[Copies]:
    """SwapAdvisor (ASPLOS'20): genetic search over size classes, Belady eviction, earliest way back."""
    problem = board.problem

    def rate(leaving: list[int]) -> tuple[float, float]:
        if now() > problem.until:
            raise OutOfTime
        try:
            steps = hold(
                problem, board.runs, [board.trips[number] for number in leaving], as_soon_as_possible
            )
        except CannotHold as failure:
            return float(failure.peak_bytes), 0.0
        return 0.0, problem.replay(steps).overhead

    chosen = [board.trips[number] for number in pool_of(board).evolve(rate)]
    for back in (as_soon_as_possible, just_in_time):
        yield chosen, back
