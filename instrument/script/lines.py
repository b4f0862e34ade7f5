"""Which line of the user's own code is running: the innermost frame outside torch, memopt and, if there is one, site-packages."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).resolve().parents[2])
_OURS = tuple(
    f"{_HERE}/{room}/" for room in ("memopt", "instrument", "profiler", "enforcers", "estimators", "cli")
)

_FOREIGN, _LIBRARY, _USER = range(3)


@cache
def _owner(code: CodeType) -> int:
    name = code.co_filename
    if name.startswith((_TORCH, "<")) or name.startswith(_OURS):
        return _FOREIGN
    return _LIBRARY if "site-packages" in name or "/lib/python" in name else _USER


@cache
def _short(filename: str, line: int) -> str:
    return f"{Path(filename).name}:{line}"


def user_line() -> str:
    """`train.py:41`, or the library line nearest to it, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        owner = _owner(frame.f_code)
        if owner == _USER:
            return _short(frame.f_code.co_filename, frame.f_lineno)
        if owner == _LIBRARY and not library:
            library = _short(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return library
