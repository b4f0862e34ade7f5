"""The one clock of all searches: the time that a search has had, which is the processor's, so that other load on the machine does not cut it short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MOST_STRETCH = 3.0
"""However busy the machine is, a limit lasts at most this many times as long by the wall."""
_WINDOW_S = 2.0
"""By the wall, over which the stretch is measured."""
_FINE_S = 0.001
"""By the wall: the processor is asked no more often, since that is a system call, and a search looks thousands of times a second."""


class OutOfTime(Exception):
    """A strategy that runs inside a time limit has to stop."""


class SearchClock:
    """Seconds of the processor, never more than have passed by the wall (threads), nor less than a third of them."""

    def __init__(self) -> None:
        self._wall, self._processor = time.monotonic(), time.process_time()
        self._had = 0.0
        self._since: tuple[float, float] = (self._wall, 0.0)
        self._stretch = 1.0

    def __call__(self) -> float:
        """A moment; only differences mean something."""
        wall = time.monotonic()
        if wall - self._wall < _FINE_S:
            return self._had
        processor = time.process_time()
        passed, worked = wall - self._wall, processor - self._processor
        self._wall, self._processor = wall, processor
        self._had += max(0.0, min(passed, max(worked, passed / _MOST_STRETCH)))
        if wall - self._since[0] > _WINDOW_S:
            stretch = (wall - self._since[0]) / max(self._had - self._since[1], 1e-9)
            self._stretch = min(max(stretch, 1.0), _MOST_STRETCH)
            self._since = wall, self._had
        return self._had

    @property
    def stretch(self) -> float:
        """Seconds by the wall for each that the search has had, lately."""
        return self._stretch


_clock: Callable[[], float] = SearchClock()


def now() -> float:
    """A moment on the clock; only differences mean something."""
    return _clock()


def wall_s(seconds: float) -> float:
    """What a solver that watches the wall is to be given for so many seconds of this clock."""
    return seconds * (_clock.stretch if isinstance(_clock, SearchClock) else 1.0)


@contextmanager
def reading(clock: Callable[[], float]) -> Iterator[None]:
    """Every search reads `clock` while the block runs: tests count looks instead of seconds."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
