"""How long the script itself takes between ops while it is recorded: for a plain step where none could be timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_OURS_NS = 100_000
"""Of each gap, about what goes to the hooks of memopt's that are no op: saved tensors, calls of modules."""


class BetweenOps:
    """Adds up the gaps between what memopt does; of the thread that trains."""

    def __init__(self) -> None:
        self._since_ns = 0
        self._total_ns = 0

    def go_on(self) -> None:
        """The script goes on from here."""
        self._since_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """It has come to memopt again."""
        if self._since_ns:
            self._total_ns += max(0, time.perf_counter_ns() - self._since_ns - _OURS_NS)
            self._since_ns = 0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is done inside is memopt's."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    @property
    def total_ms(self) -> float:
        """Of all gaps until now."""
        return self._total_ns / 1e6
