"""When each swapped storage comes back: the latest unpack early enough that the copy hides, and late enough that the bytes fit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from msgspec.structs import replace

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.trace_view import Ints, Saved

_SLACK = 1.25
"""A copy is given this much longer than the link's rate says."""


def place_prefetches(problem: Problem, decisions: Decisions, *, earliest: bool = False) -> Decisions:
    """`decisions` with `prefetch_op` set for every swap, on one FIFO lane, backwards from the last use.

    `earliest`: as far ahead as the bytes fit, however short the copy is.
    """
    if all(decision.kind != "swap" for decision in set(decisions.values())):
        return decisions
    view, copy_ms = problem.view, problem.simulator.copy_ms
    placed = {s: _started_at(d, -1) if d.kind == "swap" else d for s, d in decisions.items()}
    timeline = problem.run(placed)
    times, high = timeline.start_ms.tolist(), timeline.high_bytes.copy()
    triggers = problem.triggers
    fitting = _Fitting(problem.target_bytes, triggers.tolist(), timeline.start_ms[triggers].tolist(), high)
    lane_ms = following_ms = float("inf")
    back_by = problem.simulator.back_by(placed)
    uses = [
        (back_by.get(s, view.saved[s].first_use), view.saved[s].order, s)
        for s, d in placed.items()
        if d.kind == "swap"
    ]
    for use, _, storage in sorted(uses, key=lambda row: (-row[0], *row[1:])):
        saved, decision = view.saved[storage], placed[storage]
        took_ms = copy_ms(saved.size_bytes, decision, out=False)
        end_ms = min(lane_ms, times[use])
        wanted = -1.0 if earliest else min(following_ms, end_ms - _SLACK * took_ms)
        trigger = fitting.trigger(saved, use, wanted)
        lane_ms = end_ms - took_ms
        if trigger >= 0:
            following_ms = min(following_ms, times[trigger])
            placed[storage] = _started_at(decision, trigger)
            high[trigger:use] += saved.size_bytes
    return placed


@lru_cache(1 << 16)
def _started_at(decision: Decision, trigger: int) -> Decision:
    """The same object each time: a search places the same copies again and again, and what is identical is soon compared."""
    return replace(decision, prefetch_op=trigger)


@dataclass(slots=True)
class _Fitting:
    """Finds triggers: the moments there are, when they are, and what is on the device so far."""

    target_bytes: int
    triggers: list[int]
    times: list[float]
    high: Ints

    def trigger(self, saved: Saved, use: int, wanted_ms: float) -> int:
        """The latest at or before `wanted_ms` from which the bytes fit until the use, else the first later one; -1: on demand."""
        first = bisect_left(self.triggers, saved.gone_after + 1)
        last = bisect_left(self.triggers, use)
        if first >= last:
            return -1
        room = self.target_bytes - saved.size_bytes
        best = self.triggers[max(first, bisect_right(self.times, wanted_ms, first, last) - 1)]
        window = self.high[best:use]
        if int(np.maximum.reduce(window)) <= room:
            return best
        earliest = best + int(np.flatnonzero(window > room)[-1]) + 1
        at = bisect_left(self.triggers, earliest, first, last)
        return self.triggers[at] if at < last else -1
