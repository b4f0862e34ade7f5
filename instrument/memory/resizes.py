"""Storages whose owner frees or resizes them in place, as FSDP does with the parameters that it has gathered.

No op and no version counter tells of it: `UntypedStorage.resize_` itself is watched, which such frameworks call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import UntypedStorage


class Resizes:
    """Tells one listener of a storage before it is resized."""

    def __init__(self) -> None:
        self.told: Callable[[UntypedStorage], None] | None = None
        self._inherited = False

    def install(self) -> None:
        inherited = UntypedStorage.resize_
        self._inherited = "resize_" not in vars(UntypedStorage)

        def resize_(storage: UntypedStorage, size: int) -> Any:
            if self.told is not None and size != storage.nbytes():
                self.told(storage)
            return inherited(storage, size)

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        self.told = None
        if self._inherited:
            del UntypedStorage.resize_
            self._inherited = False
