"""What a script holds at one moment of each iteration beyond what it held there at first: what it has kept since."""

from __future__ import annotations

import gc
from collections.abc import Callable

from memopt.instrument.memory.held import held_bytes


class Held:
    """What a script holds. What the allocators have given out is known in microseconds, but malloc gives out more than tensors: how much, a look
    at all tensors tells, which takes a tenth of a second, and more in a large process."""

    def __init__(self, device: str, tensor_bytes: Callable[[], int]) -> None:
        self._device, self._look = device, tensor_bytes
        self._beside = 0
        """Bytes that were not tensors, at the last look."""

    def given_out(self, *, now_exactly: bool = False) -> int:
        """Bytes; 0 where the allocators do not tell."""
        return held_bytes(self._device, now_exactly=now_exactly)

    def tensor_bytes(self) -> int:
        """By a look."""
        tensors = self._look()
        self._beside = self.given_out(now_exactly=True) - tensors
        return tensors

    def about(self, given_out: int) -> int:
        """Bytes of tensors, if what is no tensor is what it was at the last look."""
        return given_out - self._beside


class Keeping:
    """Asked at that moment. Looks at tensors at first, and then only where the allocators tell of too much; where that is tensors, those in
    reference cycles are collected, as long as that helps."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._tensors: int | None = None
        """Bytes, at first."""
        self._most_bytes = 0
        """That the allocators had given out when it was asked."""
        self._collects = True

    def more_bytes(self, room_bytes: float) -> int:
        """Bytes of tensors that the next iteration will have beyond the first one, if the script keeps as much of it as of this one; no more is
        said of less than `room_bytes`, or where the allocators had given out as much before. 0 where they do not tell."""
        given_out = self._held.given_out()
        if not given_out:
            return 0
        if self._tensors is None:
            self._most_bytes, self._tensors = given_out, self._held.tensor_bytes()
            return 0
        again, told = self._told(given_out)
        if told > room_bytes:  # the answer may be of before gradients went
            given_out = self._held.given_out(now_exactly=True)
            again, told = self._told(given_out)
        self._most_bytes = max(given_out, self._most_bytes)
        if told <= room_bytes:
            return 0
        more = _more(self._held.tensor_bytes() - self._tensors, again)
        if more > room_bytes and self._collects:
            gc.collect()
            more = _more(self._held.tensor_bytes() - self._tensors, again)
            self._collects = more <= room_bytes
        return more

    def _told(self, given_out: int) -> tuple[int, int]:
        """Bytes beyond the most that had been given out before, and the same as `more_bytes` by the allocators alone."""
        assert self._tensors is not None
        again = max(0, given_out - self._most_bytes)
        return again, _more(self._held.about(given_out) - self._tensors, again)


def _more(kept: int, again: int) -> int:
    return kept + min(again, kept)
