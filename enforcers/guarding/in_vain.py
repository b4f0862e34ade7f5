"""Where watching is in vain: iterations pass the budget, and nothing is left that the guard could move. It costs each op, and tells nothing that is
not known by then."""

from __future__ import annotations

_IN_VAIN = 4
"""Iterations in a row."""
_SLEEPS = 16
"""Iterations for which it is left then, and twice as many each time that it was in vain again."""
_MORE = 1.02


class InVain:
    """Told of each iteration that was watched."""

    def __init__(self) -> None:
        self._count = 0
        self._sleeps = _SLEEPS
        self._until = 0
        self._most_bytes = 0
        """Saved in an iteration in which it was."""

    def is_over(self, iteration: int, saved_bytes: int = 0) -> bool:
        """Is `iteration` not worth it, which has saved so much?"""
        return iteration < self._until and saved_bytes <= _MORE * self._most_bytes

    def watched(self, iteration: int, saved_bytes: int, *, moved: bool, passed: bool) -> None:
        """`iteration` was, which saved so much: were tensors moved, and did it pass the budget all the same?"""
        if moved:
            self._count, self._sleeps, self._until, self._most_bytes = 0, _SLEEPS, 0, 0
        elif passed:
            self._count += 1
            self._most_bytes = max(self._most_bytes, saved_bytes)
            if self._count >= _IN_VAIN:
                self._until = iteration + 1 + self._sleeps
                self._count, self._sleeps = _IN_VAIN - 1, 2 * self._sleeps
