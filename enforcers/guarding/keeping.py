"""What a script holds at one moment of each iteration beyond what it held there at first: what it has kept since."""

from __future__ import annotations

import gc
from collections.abc import Callable

from memopt.instrument.memory.held import held_bytes


class Keeping:
    """Asked at that moment. What the allocators have given out is known in microseconds, but malloc gives out more than tensors: those are
    looked for at first, and then only where it tells of too much. Tensors in reference cycles are collected then, as long as that helps."""

    def __init__(self, device: str, tensor_bytes: Callable[[], int]) -> None:
        self._device, self._tensor_bytes = device, tensor_bytes
        self._held = self._tensors = 0
        """At first."""
        self._most_bytes = 0
        """That the allocators had given out when it was asked."""
        self._begun = False
        self._collects = True

    def more_bytes(self, room_bytes: float) -> int:
        """Bytes of tensors that the next iteration will have beyond the first one, if the script keeps as much of it as of this one; no more is
        said of less than `room_bytes`, or where the allocators had given out as much before. 0 where they do not tell."""
        held = held_bytes(self._device)
        if not held:
            return 0
        if not self._begun:
            self._begun, self._held, self._tensors = True, held, self._tensor_bytes()
            self._most_bytes = held
            return 0
        again = max(0, held - self._most_bytes)
        self._most_bytes = max(self._most_bytes, held)
        if held - self._held + again <= room_bytes:
            return 0
        if self._collects:
            gc.collect()
            held = held_bytes(self._device)
        kept = self._tensor_bytes() - self._tensors
        more = kept + min(again, kept)
        self._held, self._collects = held - kept, self._collects and more <= room_bytes
        return more
