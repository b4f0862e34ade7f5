"""What a script holds at one moment of each iteration beyond what it held there at first: what it has kept since."""

from __future__ import annotations

from collections.abc import Callable


class Keeping:
    """Asked at that moment. What the allocators have given out is known in microseconds, but malloc gives out more than tensors: those are
    looked for at first, and then only where it tells of too much."""

    def __init__(self, tensor_bytes: Callable[[], int]) -> None:
        self._tensor_bytes = tensor_bytes
        self._held = self._tensors = 0
        """At first."""
        self._last_bytes = 0
        self._begun = False

    def more_bytes(self, held_bytes: int, room_bytes: float) -> int:
        """Bytes of tensors that the next iteration will have beyond the first one, if the script keeps as much of it as of this one; no more is
        said of less than `room_bytes`. `held_bytes`: what the allocators have given out."""
        if not self._begun:
            self._begun, self._held, self._tensors = True, held_bytes, self._tensor_bytes()
            self._last_bytes = held_bytes
            return 0
        again = max(0, held_bytes - self._last_bytes)
        self._last_bytes = held_bytes
        if held_bytes - self._held + again <= room_bytes:
            return 0
        kept = self._tensor_bytes() - self._tensors
        self._held = held_bytes - kept
        return kept + min(again, kept)
