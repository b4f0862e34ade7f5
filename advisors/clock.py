"""The time that a search has had: the processor's, so that other load on the machine does not cut it short."""

from __future__ import annotations

import time

_MOST_STRETCH = 3.0
"""However busy the machine is, a limit lasts at most this many times as long by the wall."""


class SearchClock:
    """Seconds of the processor, never more than have passed by the wall (threads), nor less than a third of them."""

    def __init__(self) -> None:
        self._wall, self._processor = time.monotonic(), time.process_time()
        self._had = 0.0

    def __call__(self) -> float:
        """A moment; only differences mean something."""
        wall, processor = time.monotonic(), time.process_time()
        passed, worked = wall - self._wall, processor - self._processor
        self._wall, self._processor = wall, processor
        self._had += min(passed, max(worked, passed / _MOST_STRETCH))
        return self._had


now = SearchClock()
