"""Bytes that are held at this moment: what the allocators have given out. Asked for in microseconds, or rarely."""

from __future__ import annotations

import ctypes
import platform
import time
from functools import cache
from typing import Any

_QUICK_S = 2e-4
_REST = 100
"""Times as long as an answer took is the one before it good enough: malloc counts its free pieces, of which there may be very many."""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2`, mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


class _Malloc:
    """glibc's."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask
        self._found, self._good_until = 0, 0.0

    def held_bytes(self, *, now_exactly: bool) -> int:
        now = time.perf_counter()
        if now_exactly or now >= self._good_until:
            began = time.thread_time()  # which does not tell of other processes
            found = self._ask()
            self._found = int(found.uordblks + found.hblkhd)
            took = time.thread_time() - began
            self._good_until = now + (_REST * took if took > _QUICK_S else 0.0)
        return self._found


def held_bytes(kind: str, *, now_exactly: bool = False) -> int:
    """On a device of `kind`. On a CPU it is all that malloc has given out: tensors, and what else libraries hold;
    Python's own small objects are not among it. 0 where nobody can be asked (no glibc of 2.33 or later, another malloc). Unless it is to be
    `now_exactly`, an answer may be some ms old where it takes long."""
    if kind == "cuda":
        import torch

        return torch.cuda.memory_allocated()
    malloc = _malloc()
    return malloc.held_bytes(now_exactly=now_exactly) if malloc is not None else 0


@cache
def _malloc() -> _Malloc | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Mallinfo
    return _Malloc(ask)
