"""A small population of run sequences: restarts and crossovers in time, each followed by a slice of local search.

A run sequence is, for every op, the reruns before its first run. Any mixture by time of two valid sequences is again one that
has all its reads (memory may be short: repair). Decisions in far-apart parts of the iteration hardly meet, so the better halves of
two plans often make a better plan, where one descent from one start stays in its local optimum.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from memopt.advisors.clock import now
from memopt.advisors.graphs.runs import Swap
from memopt.advisors.graphs.search.neighbourhood import Search

POOL = 6
"""Plans that are kept to be crossed: few, so that each is better than most that are found."""
NOISES = (0.3, 0.15, 0.5, 0.3)
"""Of the greedy starts, in turn: how far they stray from the cheapest eviction, so that no two are the same."""
BREADTHS = (0.5, 1.0, 0.5, 0.0)
"""Of the same starts: from one eviction at a time to many at once."""
HEATS = (0.004, 0.015, 0.05)
"""As shares of the plan's cost: one search hardly takes what is dearer, one a little, one much; which is best differs by graph."""


@dataclass(frozen=True, slots=True)
class Member:
    """One plan of the population."""

    over: int
    cost: float
    runs: list[int]
    swaps: frozenset[Swap]


class Evolution:
    """The population and its one move; the best plan of all stays in `search`."""

    def __init__(self, search: Search, seed: int = 0) -> None:
        self.search = search
        self.random = random.Random(seed)
        self.pool: list[Member] = []
        self.starts = 0

    def add(self, runs: list[int], swaps: frozenset[Swap], until: float) -> None:
        """Search from a plan until then, and let the outcome join the population."""
        search = self.search
        search.load(runs, swaps)
        search.press(until)
        search.mend(until)
        search.run(until, heat=self.random.choice(HEATS))
        self._join(
            Member(
                search.overflow(),
                search.state.cost,
                search.state.runs(),
                frozenset(search.lanes.swaps) if search.lanes else frozenset(),
            )
        )

    def _join(self, member: Member) -> None:
        if any(abs(member.cost - other.cost) < 1e-9 for other in self.pool):
            return
        self.pool.append(member)
        self.pool.sort(key=lambda each: (each.over, each.cost))
        del self.pool[POOL:]

    def run(self, until: float, slice_s: float, enough: float) -> None:
        """Restart while the population is small, then mostly cross."""
        search, rnd = self.search, self.random
        while (moment := now()) < until and search.best_cost > enough + 1e-9:
            stop = min(until, moment + slice_s)
            if (
                len(self.pool) >= 2
                and (len(self.pool) >= POOL // 2 or self.starts > POOL)
                and rnd.random() < 0.75
            ):
                one, other = rnd.sample(self.pool, 2)
                self.add(*self.cross(one, other), stop)
            else:
                swap_first = rnd.choice((0.0, 0.5, 1.0)) if search.lanes else 0.0
                search.greedy(NOISES[self.starts % 4], BREADTHS[self.starts % 4], stop, swap_first)
                swaps = frozenset(search.lanes.swaps) if search.lanes else frozenset()
                self.add(search.state.runs(), swaps, stop)
                self.starts += 1

    def cross(self, one: Member, other: Member) -> tuple[list[int], frozenset[Swap]]:
        """The middle of `one` between two moments, the rest of `other`."""
        count = self.search.graph.op_count
        low, high = sorted(self.random.sample(range(count + 1), 2))
        mine, theirs = stages(one.runs, count), stages(other.runs, count)
        runs: list[int] = []
        for op in range(count + 1):
            runs.extend((mine if low <= op < high else theirs)[op])
            if op < count:
                runs.append(op)
        swaps = {swap for swap in one.swaps if low <= swap[1] < high}
        swaps |= {swap for swap in other.swaps if not low <= swap[1] < high}
        return runs, frozenset(swaps)


def stages(runs: list[int], op_count: int) -> list[list[int]]:
    """Reruns before the first run of each op; last, those after all first runs."""
    found: list[list[int]] = [[] for _ in range(op_count + 1)]
    following = 0
    for op in runs:
        if op == following:
            following += 1
        else:
            found[following].append(op)
    return found
