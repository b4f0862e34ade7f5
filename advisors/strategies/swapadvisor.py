"""SwapAdvisor (Huang, Jin, Li, ASPLOS 2020): genetic search over a pool of size classes, with Belady eviction as the planner inside.

Rule: a chromosome fixes what the deterministic swap planner is free to choose, here which tensor lies in which class of the pool and how
many slots each class has (`size_classes`); the planner walks the ops, and where a class is full evicts the tensor of it whose
next use is furthest. It leaves as soon as its last use before has ended; fitness is the simulated step time. O(156 plans).
Differs: the order of the ops, the chromosome's other part, is the script's own. Only what autograd saves lies in the pool, and
PyTorch's allocator gives every tensor its place: classes say what leaves, not where it lies. A tensor comes back at the last
moment that hides its copy, not as early as memory allows: the link is a queue, in which early ones hold up those needed first.
"""

from __future__ import annotations

from memopt.advisors.clock import now
from memopt.advisors.profiles.blockers import infeasible
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.size_classes import Pool, Tensor


class Swapadvisor:
    name = "swapadvisor"
    paper = (
        "Huang et al. 2020, SwapAdvisor: Push Deep Learning Beyond the GPU Memory Limit via Smart Swapping"
    )
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def plan(self, problem: Problem, /) -> Decisions:
        able = swappable(problem)
        limited = problem.limited(now() + problem.seconds_left)

        def away(problem: Problem, leaving: list[int]) -> Decisions:
            swaps = {able[number].storage: swap_of(able[number]) for number in leaving}
            return place_prefetches(problem, swaps)

        def rate(leaving: list[int]) -> tuple[float, float]:
            timeline = limited.run(away(limited, leaving))
            return max(0, timeline.peak_bytes - problem.target_bytes), timeline.step_ms

        decisions = away(problem, pool_of(problem, able).evolve(rate))
        if not problem.fits(problem.run(decisions)):
            raise infeasible(problem, decisions, self.name)
        return decisions


def pool_of(problem: Problem, able: list[Candidate]) -> Pool:
    """The pool in which `able` lie."""
    tensors = [
        Tensor(c.saved.size_bytes, slice(max(0, int(problem.view.birth[c.storage])), c.saved.release + 1), c.away)
        for c in able
    ]  # fmt: skip
    return Pool(tensors, problem.plain.high_bytes, problem.target_bytes)
