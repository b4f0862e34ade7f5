"""Where in the script's code a module is called, and which calls of an iteration take the place of which calls of another.

Calls are counted apart by the place in the code that makes them, and places that were never met in one iteration stand for each
other (two branches, two phases). So a call that is made in some iterations only (samples drawn with a graph, a lazy penalty) shifts
no other. What runs after the step and before the loop comes round again counts apart as well: it is there before the next
iteration's own calls, and in the very iteration in which it is first met nobody could know that it is one too many.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Hashable, MutableMapping
from math import inf
from types import CodeType, FrameType
from typing import Any

from torch.nn.modules import module as torchs_module

from memopt.instrument import traced

_PASSED_OVER = (torchs_module.__file__, traced.__file__)
"""Between the script's call of a module and the hooks."""

_DEEPEST = 64
"""Frames that make a place, from the innermost."""


class Loop:
    """Where the innermost loop around the step was when its last iteration ended."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[int, int, float]] = {}
        """id of a frame -> (id of its code, instruction, the last instruction of the loop there)."""
        self.is_at_its_end = False
        """No module has been called since that the next round of the loop calls."""

    def iteration_ended(self) -> None:
        """Remember who is running, up to the function with the loop in it."""
        self._at.clear()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not str(frame.f_globals.get("__name__")).startswith(("torch.", "memopt.")):
                around = [end for start, end in _loops(frame.f_code) if start <= frame.f_lasti <= end]
                self._at[id(frame)] = (id(frame.f_code), frame.f_lasti, min(around, default=inf))
                if around:
                    break
            frame = frame.f_back
        self.is_at_its_end = frame is not None

    def place(self) -> int:
        """The place in the code that calls a module now: the same number each time, in this run.

        A place is a chain of calls: a helper that is called from two lines is two places.
        """
        caller = _caller()
        chain: list[int] = []
        frame = caller
        while frame is not None and len(chain) < 2 * _DEEPEST:
            chain += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        if self.is_at_its_end:
            self.is_at_its_end = self._is_below_the_step(caller)
        return hash(tuple(chain))

    def _is_below_the_step(self, frame: FrameType | None) -> bool:
        """Of the functions that ran then, is the innermost that still runs further down in its loop than the step?"""
        while frame is not None:
            code, instruction, end = self._at.get(id(frame), (0, 0, 0))
            if code == id(frame.f_code):
                return instruction < frame.f_lasti <= end
            frame = frame.f_back
        return False


_known_loops: dict[int, tuple[CodeType, list[tuple[int, int]]]] = {}
"""id of code -> the code, which it keeps alive, and its loops: to compare code objects takes long."""


def _loops(code: CodeType) -> list[tuple[int, int]]:
    """First and last instruction of each loop."""
    known = _known_loops.get(id(code))
    if known is None:
        jumps = (each for each in dis.get_instructions(code) if "JUMP_BACKWARD" in each.opname)
        known = _known_loops[id(code)] = (code, [(int(each.argval), each.offset) for each in jumps])
    return known[1]


def _caller() -> FrameType | None:
    """The innermost frame that is neither memopt's hooks nor torch's call of a module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_filename in _PASSED_OVER or frame.f_globals.get("__package__") == __package__
    ):
        frame = frame.f_back
    return frame


class Roles:
    """Numbers for those who act in an iteration (places in the code, modules of one class): each has the number that it had before.

    A newcomer gets the lowest number that nobody has had in this iteration: it stands for whoever had it before. If they meet in one
    iteration after all, the one who has had it more often keeps it.
    """

    def __init__(self, numbers: MutableMapping[Hashable, int] | None = None) -> None:
        """`numbers`: where those that are known are kept; one with weak keys for modules."""
        self._numbers: MutableMapping[Any, int] = {} if numbers is None else numbers
        self._taken: dict[int, int] = {}
        """In this iteration: number -> whose it is."""
        self._had: dict[int, int] = {}
        """In how many iterations each has had its number."""
        self._moved: dict[int, int] = {}
        """Numbers of those who have met the one for whom they stood."""
        self._highest = -1
        self._iteration = -1

    def of(self, who: Hashable, iteration: int) -> int:
        """The number of `who` in this iteration."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._taken.clear()
        mark = who if isinstance(who, int) else id(who)
        known = self._numbers.get(who)
        if known is None:
            number = next(n for n in range(len(self._taken) + 1) if n not in self._taken)
            self._numbers[who], self._had[mark] = number, 0
            self._moved.pop(mark, None)  # of another, who had this address
        else:
            number = self._moved.get(mark, known)
        other = self._taken.get(number, mark)
        if other != mark:
            number = self._highest + 1
            self._moved[mark if self._had[mark] < self._had[other] else other] = number
        self._highest = max(self._highest, number)
        if self._taken.get(number) != mark:
            self._taken[number] = mark
            self._had[mark] += 1
        return number

    def release(self, number: int) -> None:
        """Whoever has `number` in this iteration has done nothing after all."""
        self._taken.pop(number, None)


def roles_of_modules() -> Roles:
    """Roles of modules, which it does not keep alive."""
    return Roles(weakref.WeakKeyDictionary())
