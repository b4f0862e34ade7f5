"""How long an iteration takes that nobody records: the median of as many as are quickly had."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from memopt.trace import Watching

_MOST_JOINING = 3
"""Optimizers that may join in the first round. A script that makes a new one for each step must not be waited for."""
_ENOUGH = 6
_MOST_MS = 2000.0
"""Spent on plain iterations once all is recorded."""
_LEAST_PAIRS = 3
_OF_NORMAL = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""
_OF_MEDIAN = 1.2533
"""Standard error of a median, in those of a mean."""


class PlainSteps:
    """Counts the iterations of a script, and times those that are not recorded."""

    def __init__(self) -> None:
        self._times_ms: list[float] = []
        self._watched_ms: list[tuple[int, float]] = []
        """(plain ones before it, time)."""
        self.parts = 0
        """Iterations that ended before the last optimizer had joined the first round (a GAN's): parts of one."""
        self._spent_ms = 0.0

    def number(self, count: int, rounds: int, *, came_late: bool = False) -> int:
        """The iteration that the `count`-th end of one ends; `rounds` of them has the optimizer whose steps end iterations ended."""
        if count > 1 and rounds == 1 and (came_late or count <= _MOST_JOINING):
            self.parts = count - 1
            self._times_ms.clear()
            self._watched_ms.clear()
        return count - self.parts

    def add(self, milliseconds: float, *, waited_for: bool) -> None:
        """One has ended; were it not for its time, the script would have been stopped before?"""
        self._times_ms.append(milliseconds)
        self._spent_ms += milliseconds if waited_for else 0

    def add_watched(self, milliseconds: float) -> None:
        """One between two plain ones has ended, in which memopt watched and did nothing."""
        self._watched_ms.append((len(self._times_ms), milliseconds))

    @property
    def worth_watching(self) -> bool:
        """Shall a watched one follow? Not the first plain one, which is slow, and not where there is time for too few."""
        return len(self._times_ms) > 1 and self._times_ms[-1] * _ENOUGH <= _MOST_MS

    def watching(self, ops: int, tensors: int) -> Watching | None:
        """What watching so many costs, from each watched iteration and its plain neighbours; None after too few of them."""
        times = self._times_ms
        more = [
            watched - (times[at - 1] + times[at]) / 2 for at, watched in self._watched_ms if at < len(times)
        ]
        if len(more) < _LEAST_PAIRS:
            return None
        middle = median(more)
        deviation = _OF_NORMAL * median(abs(each - middle) for each in more)
        return Watching(ops, tensors, middle, _OF_MEDIAN * deviation / math.sqrt(len(more)))

    @property
    def timed(self) -> bool:
        """Has there been one?"""
        return bool(self._times_ms)

    @property
    def several(self) -> bool:
        """More than one?"""
        return len(self._times_ms) > 1

    @property
    def enough(self) -> bool:
        """Another one would add little, or take too long."""
        last = self._times_ms[-1] if self._times_ms else 0.0
        return len(self._times_ms) >= _ENOUGH or self._spent_ms + last > _MOST_MS

    def step_ms(self, recorded_ms: float, shares: Sequence[float] = ()) -> float:
        """The median, without the first if there are others: it is early, and slow. `shares`: times as much as each of them the recorded iteration
        saved, where that is known: it takes about as many times as long.

        Never more than the recorded iteration took (0: not known), which recording has slowed down: one with an evaluation in it is no
        plain step. `recorded_ms` if there were none.
        """
        known = shares if len(shares) == len(self._times_ms) else [1.0] * len(self._times_ms)
        times = [each * share for each, share in zip(self._times_ms, known, strict=True)]
        steady = times[1:] or times
        found = [*([median(steady)] if steady else []), *([recorded_ms] if recorded_ms else [])]
        return min(found, default=0.0)
