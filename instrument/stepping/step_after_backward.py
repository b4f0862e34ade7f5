"""Does the script step an optimizer right after this backward call, whatever happens? Read off its bytecode, before backward runs.

Only loads and attribute look-ups may stand between the two calls: no branch, no other call, no store. What is proved this
way holds for the round at hand; nothing is learned from earlier rounds.
"""

from __future__ import annotations

import dis
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

PASSED_OVER = frozenset(
    {"NOP", "CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL", "RESUME", "NOT_TAKEN", "KW_NAMES"}
)
LOADS = frozenset(
    {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL"}
)
_LOOKS_AT_LOCALS = frozenset({"locals", "vars", "dir", "eval", "exec"})
_OF_TORCH = frozenset({torch.Tensor.backward.__code__, torch.autograd.backward.__code__})


@dataclass(frozen=True, slots=True)
class Ahead:
    """What comes after a backward call."""

    path: tuple[str, ...] = ()
    """Names that lead to the object that is stepped: a variable, then attributes. Empty when something else comes."""
    where: str = ""
    """`train.py:41`: what comes instead."""


_known: dict[tuple[CodeType, int], Ahead] = {}


def caller_of_backward() -> FrameType | None:
    """The frame that called backward, seen from a function that torch's own `backward` calls; None when it was not called so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        frame = frame.f_back
    while frame is not None and frame.f_code in _OF_TORCH:
        frame = frame.f_back
    return frame


def step_ahead_of(frame: FrameType) -> Ahead:
    """What `frame` does when the call that it is in returns."""
    key = frame.f_code, frame.f_lasti
    if key not in _known:
        _known[key] = _read(*key)
    return _known[key]


def _read(code: CodeType, at: int) -> Ahead:
    after = {
        instruction.offset: instruction
        for instruction in dis.get_instructions(code)
        if instruction.offset >= at
    }
    stack: list[tuple[str, ...]] = [()]
    jump_to = -1
    for offset, instruction in after.items():
        name = instruction.opname
        if offset == at:
            if not name.startswith("CALL"):
                return _other(code, instruction)
        elif offset < jump_to or name in PASSED_OVER:
            continue
        elif name == "JUMP_FORWARD":
            jump_to = int(instruction.argval)
        elif name == "POP_TOP" and stack:
            stack.pop()
        elif name in LOADS:
            stack.append((str(instruction.argval),))
        elif name in ("LOAD_METHOD", "LOAD_ATTR") and stack and stack[-1]:
            stack[-1] = (*stack[-1], str(instruction.argval))
        elif name == "CALL" and not instruction.arg and len(stack) == 1 and stack[0][1:][-1:] == ("step",):
            return Ahead(path=stack[0][:-1])
        else:
            return _other(code, instruction)
    return Ahead(where=Path(code.co_filename).name)


def _other(code: CodeType, instruction: dis.Instruction) -> Ahead:
    line = instruction.positions.lineno if instruction.positions is not None else None
    return Ahead(where=f"{Path(code.co_filename).name}:{line or code.co_firstlineno}")


def find(frame: FrameType, path: tuple[str, ...]) -> object:
    """The object that `path` leads to in `frame`; None where only running code of the script could tell."""
    found = _variable(frame, path[0])
    for name in path[1:]:
        owner = type(found)
        if inspect.getattr_static(owner, name, None) is not None:
            return None
        own = getattr(found, "__dict__", {})
        if name not in own:
            return None
        found = own[name]
    return found


def _variable(frame: FrameType, name: str) -> object:
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return frame.f_locals.get(name, frame.f_globals.get(name))
    if name not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return frame.f_globals.get(name)
    if sys.version_info >= (3, 13):
        return frame.f_locals.get(name)
    if _LOOKS_AT_LOCALS & {*code.co_names} or sys.gettrace() is not None:
        return None
    # Before Python 3.13 this is a copy that stays in the frame, and would keep what the variables hold now alive.
    copy = frame.f_locals
    found = copy.get(name)
    copy.clear()
    return found
