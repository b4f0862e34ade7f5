"""Which line of source asks for a value that was never computed, be it the script's or a library's, and what it hopes for."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import Any

import torch

LBFGS = str(sys.modules[torch.optim.LBFGS.__module__].__file__)
LBFGS_HOPES = ("if ys >", "if f_new > (f + c1 * t * gtd) or (", "if abs(gtd_new) <=")
"""Its curvature lets it remember the step; a line search brackets at once and is content with the first point inside."""
_TORCH, _HERE = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])
_DISTRIBUTIONS = f"{_TORCH}/distributions"
_LIBRARIES = (_TORCH, _HERE, "<frozen", "<string>")
_DISPATCH = (_HERE, f"{_TORCH}/_dynamo", f"{_TORCH}/_compile.py", f"{_TORCH}/utils/_python_dispatch.py")
"""Frames between an op and whoever called it."""


def user_line() -> str:
    """`file:line` of the innermost frame that belongs to the script rather than to a library."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_in(library: str) -> str:
    """The line of a file or folder of torch's that asks, or nothing."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(library):
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        frame = frame.f_back
    return ""


def asking_line() -> tuple[str, int]:
    """File and line that ask for a value, be they the script's or a library's."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_DISPATCH):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def loop_at(where: tuple[str, int]) -> tuple[str, int] | None:
    """`where`, if it is the head of a `while`."""
    return where if linecache.getline(*where).lstrip().startswith("while ") else None


def hope_of(where: tuple[str, int]) -> bool | None:
    """What the line at `where` hopes that a condition is, if it says so: checks hold, samples and a solver's steps are accepted."""
    line = linecache.getline(*where).lstrip()
    if line.startswith("assert"):
        return not line.startswith("assert not ")
    if line.startswith("if not ") and " or " not in line and _raises(*where, line):
        return True
    good_enough = where[0].startswith(_DISTRIBUTIONS) or "accept" in line
    return True if good_enough else None


def ends(file: str, number: int) -> bool:
    """Whether a condition that holds would raise, or go round once more."""
    line = linecache.getline(file, number).lstrip()
    return line.startswith("while") or _raises(file, number, line)


def _raises(file: str, number: int, line: str) -> bool:
    return ": raise" in line or linecache.getline(file, number + 1).lstrip().startswith("raise")


def is_users(filename: str) -> bool:
    """Whether a source file belongs to the script rather than to Python, a library or memopt."""
    return (
        "site-packages" not in filename
        and "/lib/python3" not in filename
        and not filename.startswith(_LIBRARIES)
        and not filename.endswith("instrument/script/runner.py")
    )


def split_line(where: str) -> tuple[str, int]:
    """What `user_line` told, in two."""
    name, _, line = where.rpartition(":")
    return name, int(line or 0)
