"""Tells when the script makes its first optimizer: most scripts do that when all else is prepared."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import optimizer as optim


class WhenOptimizerMade:
    """Calls `action` once, after an optimizer has been made."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._original: Any = optim.Optimizer.__init__
        self._ours: Any = None

    def install(self) -> None:
        original = self._original

        @wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self._ours is not None:
                self.remove()
                self._action()

        self._ours = optim.Optimizer.__init__ = init  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        """Put torch's own back, unless somebody has put another around ours."""
        if optim.Optimizer.__init__ is self._ours:
            optim.Optimizer.__init__ = self._original  # type: ignore[method-assign]
        self._ours = None
