"""From the end of an iteration to the next call of a module the guard sees no ops: what is made meanwhile is counted where an op is given it,
and the script's tensors are looked for anew where malloc holds clearly more than was known of."""

from __future__ import annotations

from memopt.enforcers.guarding.live_bytes import Live
from memopt.instrument.memory.held import held_bytes

_LITTLE = 128
"""Of the budget, this part may be unknown."""
_LEAST_BYTES = 256 * 1024
_MOST_LOOKS = 16
"""More, in a row, or one in two for twice as long: to look takes longer than to watch."""


class Sleep:
    """Of the guard of one run."""

    def __init__(self, device: str, budget_bytes: int) -> None:
        self._device = device
        self._little_bytes = max(_LEAST_BYTES, budget_bytes // _LITTLE)
        self._unknown_bytes: int | None = None
        """Held beside the tensors that were known, when it was last looked for all of them."""
        self.goes_on = self.was_there = False
        """Now, and in this iteration."""
        self._looks = 0
        """Three for each end at which it was looked for all tensors, less one for each end."""

    def may_begin(self, live: Live) -> bool:
        """Can it be known afterwards whether there is clearly more? Until it was looked for all tensors that is not known."""
        if self._device != "cpu":
            return True
        if self._looks > _MOST_LOOKS:
            return False
        if self._unknown_bytes is None:
            self.looked_around(live)
        return self._unknown_bytes is not None

    def begin(self) -> None:
        self.goes_on = self.was_there = True

    def is_over(self) -> None:
        self.goes_on = False

    def looked_around(self, live: Live) -> None:
        """`live` knows of all tensors."""
        self._unknown_bytes = self._held(live)

    def count_unseen(self, live: Live) -> None:
        """Look for tensors, if there is clearly more than is known of."""
        held = self._held(live)
        self._looks = max(0, self._looks - 1)
        if held is not None and held > (self._unknown_bytes or 0) + self._little_bytes:
            self._looks += 3
            self.looked_around(live.look_around())

    def _held(self, live: Live) -> int | None:
        """Bytes that malloc has given out and that are no known tensor; None where nobody can be asked."""
        held = held_bytes(self._device, now_exactly=True) if self._device == "cpu" else 0
        return held - live.bytes if held else None
