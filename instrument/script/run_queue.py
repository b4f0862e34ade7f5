"""How long a thread has been ready to run and waited for a processor: what others on the machine, and the planner's process, took from it."""

from __future__ import annotations

import threading
import time


def waited_ms() -> float:
    """Of this thread, since it began; 0 where the kernel does not tell (proc(5), `schedstat`)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return 0.0


class Stretch:
    """A stretch of time of the thread that asks, from when this is made or begun again."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._thread, self._began, self._waited_ms = threading.get_ident(), time.perf_counter(), waited_ms()

    @property
    def took_ms(self) -> float:
        """Until now."""
        return 1000 * (time.perf_counter() - self._began)

    @property
    def share(self) -> float:
        """Which share of it was not waited for a processor; 1 where another thread asks."""
        if threading.get_ident() != self._thread:
            return 1.0
        took_ms = self.took_ms
        return min(1.0, max(0.0, 1 - (waited_ms() - self._waited_ms) / took_ms)) if took_ms else 1.0
