"""Which line is running: the innermost of the user's own code, and of a library's below it; torch and memopt do not count."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

from memopt.instrument.by_identity import cached_by_identity

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).resolve().parents[2])
_OURS = tuple(
    f"{_HERE}/{room}/" for room in ("memopt", "instrument", "profiler", "enforcers", "estimators", "cli")
)

FROM = ", from "
"""Between a library's line and the user's."""
_FOREIGN, _LIBRARY, _USER = range(3)


@cached_by_identity
def _owner(code: CodeType) -> int:
    """Whose it is."""
    name = code.co_filename
    if name.startswith((_TORCH, "<")) or name.startswith(_OURS):
        return _FOREIGN
    return _LIBRARY if "site-packages" in name or "/lib/python" in name else _USER


@cache
def _short(filename: str, line: int) -> str:
    return f"{Path(filename).name}:{line}"


@cache
def _of_library(filename: str, line: int) -> str:
    """`transformers: modeling_gpt2.py:312`; of a module that is a file by itself, or of Python's own, the file alone."""
    package, _, inside = filename.rpartition("site-packages/")[2].partition("/")
    return f"{package}: {_short(filename, line)}" if inside and package else _short(filename, line)


@cache
def _both(library: str, user: str) -> str:
    return f"{library}{FROM}{user}"


def user_line() -> str:
    """`train.py:41`; where a library that it called does the work, `transformers: modeling_gpt2.py:312, from train.py:41`.

    Without any line of the user's own, the library's nearest one, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        owner = _owner(frame.f_code)
        if owner == _USER:
            user = _short(frame.f_code.co_filename, frame.f_lineno)
            return _both(library, user) if library else user
        if owner == _LIBRARY and not library and "site-packages/" in frame.f_code.co_filename:
            library = _of_library(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return library
