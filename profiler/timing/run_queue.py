"""How long a thread has been ready to run and waited for a processor: what others on the machine, and the planner's process, took from it."""

from __future__ import annotations

import time


def waited_ms() -> float:
    """Of this thread, since it began; 0 where the kernel does not tell (proc(5), `schedstat`)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return 0.0


class Stretch:
    """A stretch of time, from now on, of the thread that asks."""

    def __init__(self) -> None:
        self._began, self._waited_ms = time.perf_counter(), waited_ms()

    def ends(self) -> float:
        """Which share of it was not waited for a processor; another one begins."""
        began, before_ms = self._began, self._waited_ms
        self._began, self._waited_ms = time.perf_counter(), waited_ms()
        took_ms = 1000 * (self._began - began)
        return min(1.0, max(0.0, 1 - (self._waited_ms - before_ms) / took_ms)) if took_ms else 1.0
