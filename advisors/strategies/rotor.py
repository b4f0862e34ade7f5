"""Rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, arXiv 1911.13214): optimal checkpoints on a chain of unlike stages.

Rule: a dynamic program over (stage, memory left) decides for each stretch of the chain whether all that its stages save is
kept, or only what enters it, the stretch being run again when backward comes to it, with room for all that it saves beside
what is kept before it. Exact for the chain, for every amount of memory at once (in `_SLOTS` slots, as in the paper).
O(stages^2 x slots). Differs: a net is no chain, so stages end where the fewest bytes pass, and all that passes such a place
is its checkpoint; a stretch runs again once (the paper nests; the enforcer keeps what has come back). Of the optima for all
amounts of memory, the cheapest that the simulator finds to fit is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from memopt.advisors.graphs.strategies.rotor import less_slots
from memopt.advisors.profiles.picking import cheapest_fitting
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.strategies.sublinear import Order
from memopt.estimators.simulator.decision import RECOMPUTE
from memopt.estimators.simulator.timeline import REPLAY_MS
from memopt.estimators.simulator.trace_view import Floats, Ints

_MOST_STAGES = 80
"""Longer chains are cut into so many stages: the table takes the square of their number for each slot."""
_SLOTS = 240
_MOST_PLANS = 60
"""Amounts of memory, of all the table knows, whose plans are judged."""

Stretch = tuple[int, int]
"""Stages from the first up to, not including, the second."""


class Rotor:
    name = "rotor"
    paper = "Beaumont et al. 2019, Optimal Checkpointing for Heterogeneous Chains"
    needs = "activations that can be made again, in a net that is nearly a chain"
    allows = frozenset({"recompute"})

    def plan(self, problem: Problem, /) -> Decisions:
        return cheapest_fitting(problem, rotor_plans(problem), self.name)


def rotor_plans(problem: Problem) -> Iterator[Decisions]:
    """The optimum for each amount of memory, the most memory first, without repetition."""
    stages = Stages(problem)
    seen: set[frozenset[int]] = set()
    for stretches in optima(stages.saved_bytes, stages.enters_bytes, stages.again_ms):
        dropped = stages.dropped(stretches)
        if dropped not in seen:
            seen.add(dropped)
            yield dict.fromkeys(sorted(dropped), RECOMPUTE)


def optima(saved_bytes: list[int], enters_bytes: list[int], again_ms: list[float]) -> Iterator[list[Stretch]]:
    """For falling amounts of memory, the stretches of stages that run again at the least cost."""
    if not sum(saved_bytes):
        return
    unit = sum(saved_bytes) / _SLOTS
    table = _Table(
        [-int(-size // unit) for size in saved_bytes],
        [-int(-size // unit) for size in enters_bytes],
        again_ms,
    )
    for slots in np.unique(np.linspace(0, table.slots, _MOST_PLANS).astype(int))[::-1].tolist():
        found = table.read(slots)
        if found is not None:
            yield found


class _Table:
    """Least cost from each stage on for each number of slots left; two cases: has what enters the stage been kept already?"""

    def __init__(self, saved: list[int], enters: list[int], again_ms: list[float]) -> None:
        self.saved, self.enters = saved, enters
        self.slots = sum(saved)
        count = len(saved)
        self.cost: list[list[Floats]] = [[np.zeros(self.slots + 1)] * (count + 1) for _ in range(2)]
        self.next: list[list[Ints]] = [[np.zeros(0, dtype=np.int64)] * count for _ in range(2)]
        """The stage at which the stretch that begins here ends; the stage itself: it is kept."""
        for at in range(count - 1, -1, -1):
            for case in range(2):
                entering = enters[at] if case else 0
                best = less_slots(self.cost[0][at + 1], saved[at])
                taken = np.full(self.slots + 1, at)
                room, ms = entering, 0.0
                for end in range(at + 1, count + 1):
                    room += saved[end - 1]
                    ms += again_ms[end - 1]
                    trial = ms + less_slots(self.cost[1][end], entering)
                    trial[:room] = np.inf
                    taken = np.where(trial < best, end, taken)
                    best = np.minimum(trial, best)
                self.cost[case][at], self.next[case][at] = best, taken

    def read(self, slots: int) -> list[Stretch] | None:
        """The stretches of the optimum; None when there is none in so little memory."""
        if not np.isfinite(self.cost[0][0][slots]):
            return None
        at, case, found = 0, 0, []
        while at < len(self.saved):
            end = int(self.next[case][at][slots])
            if end == at:
                slots -= self.saved[at]
                at, case = at + 1, 0
                continue
            slots -= self.enters[at] if case else 0
            found.append((at, end))
            at, case = end, 1
        return found


class Stages:
    """The recomputable storages, cut into stages at narrow places."""

    def __init__(self, problem: Problem) -> None:
        view = problem.view
        order = Order(problem)
        ends = _narrow_places(problem, order)
        starts = [0, *(end + 1 for end in ends)]
        self.members = [order.storages[a : b + 1] for a, b in zip(starts, ends, strict=False)]
        self.crossing = [frozenset(), *(order.crossing([end]) for end in ends)]
        """What enters each stage, of what can be made again."""
        size = view.size
        self.saved_bytes = [sum(int(size[s]) for s in members) for members in self.members]
        self.enters_bytes = [sum(int(size[s]) for s in crossing) for crossing in self.crossing][: len(ends)]
        made = [-1, *(order.made[end] for end in ends)]
        self.again_ms = [
            float(sum(view.op_ms[op] + REPLAY_MS for op in range(a + 1, b + 1) if view.replayable[op]))
            for a, b in pairwise(made)
        ]

    def dropped(self, stretches: list[Stretch]) -> frozenset[int]:
        """Storages that go: those made in the stretches, without what enters any of them."""
        gone = {s for first, last in stretches for members in self.members[first:last] for s in members}
        for first, _ in stretches:
            gone -= self.crossing[first]
        return frozenset(gone)


def _narrow_places(problem: Problem, order: Order) -> list[int]:
    """Positions of the last storage of each stage: of equal parts the place that the fewest bytes cross, and the very last."""
    n = len(order.storages)
    if n == 0:
        return []
    change = np.zeros(n + 1, dtype=np.int64)
    for position, (storage, size) in enumerate(zip(order.storages, order.sizes, strict=True)):
        change[position] += size
        change[max(position, bisect_left(order.made, order.last_read.get(storage, -1)))] -= size
    wide = np.cumsum(change)
    bounds = np.linspace(0, n, min(n, _MOST_STAGES) + 1).astype(int).tolist()
    ends = {a + int(np.argmin(wide[a:b])) for a, b in pairwise(bounds) if a < b}
    return sorted(ends | {n - 1})
