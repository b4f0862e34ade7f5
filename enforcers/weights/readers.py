"""Who looks at a tensor's bytes without an op that a mode would see: `data_ptr()`, `numpy()`, pickling, copying, DLPack; and printing,
for which torch switches all modes off."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

_HOUSE = str(Path(__file__).resolve().parents[2])
_OURS = tuple(f"{_HOUSE}/{room}/" for room in ("instrument", "profiler", "enforcers"))
"""Code that asks which storage a tensor has, and does not read it."""
_NAMES = ("untyped_storage", "data_ptr", "numpy", "tolist", "__dlpack__", "__repr__")
"""The rest of `torch.Tensor` goes through one of these, or through an op."""


class ByteReads:
    """Between `install` and `remove`, tells of every such look at a tensor, from any thread, before it happens."""

    def __init__(self, told: Callable[[Tensor], None], wanted: Callable[[], bool]) -> None:
        """`told` only while it is `wanted`."""
        self._told, self._wanted = told, wanted
        self._own: dict[str, Any] = {}

    def install(self) -> None:
        for name in _NAMES:
            self._own[name] = vars(Tensor).get(name)
            setattr(Tensor, name, self._telling(getattr(Tensor, name)))

    def remove(self) -> None:
        for name, own in self._own.items():
            if own is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, own)
        self._own.clear()

    def _telling(self, original: Any) -> Any:
        told, wanted, asks_where = self._told, self._wanted, original.__name__ == "untyped_storage"

        @functools.wraps(original)
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if wanted() and not (asks_where and sys._getframe(1).f_code.co_filename.startswith(_OURS)):
                told(tensor)
            return original(tensor, *args, **kwargs)

        return method
