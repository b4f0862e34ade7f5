"""Bytes that are held at this moment, asked for in microseconds: what the allocators have given out."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any


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


def held_bytes(kind: str) -> int:
    """On a device of `kind`. On a CPU it is all that malloc has given out: tensors, and what else libraries hold; Python's own small objects
    are not among it. 0 where nobody can be asked (no glibc of 2.33 or later, another malloc)."""
    if kind == "cuda":
        import torch

        return torch.cuda.memory_allocated()
    ask = _mallinfo2()
    if ask is None:
        return 0
    found = ask()
    return int(found.uordblks + found.hblkhd)


@cache
def _mallinfo2() -> Any:
    if platform.libc_ver()[0] != "glibc":
        return None
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is not None:
        ask.restype = _Mallinfo
    return ask
