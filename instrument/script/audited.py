"""What Python's audit events tell of files."""

from __future__ import annotations

import os
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


def opens_to_write(args: tuple[Any, ...]) -> bool:
    """Does an event `open` with these arguments (path, mode, flags) name a file that may be written? Not one that is open already."""
    path, mode, flags = args
    if isinstance(path, int):
        return False
    return bool(flags & _WRITES) if isinstance(flags, int) else any(c in (mode or "r") for c in "wax+")
