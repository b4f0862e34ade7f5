"""Dispatch modes of memopt's lie below those of the script: a `with` of the script exits the innermost mode, whosever it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from memopt.instrument.torch_internals import (
    TorchDispatchMode,
    current_mode,
    current_modes,
    pop_mode_temporarily,
)


def is_on(mode: TorchDispatchMode) -> bool:
    """Is `mode` one of this thread's?"""
    return any(each is mode for each in current_modes())


def enter(mode: TorchDispatchMode) -> None:
    """Enter `mode` below those that are on now (a `FlopCounterMode` around each step), if it is not on already."""
    if not is_on(mode):
        with _put_aside():
            mode.__enter__()


def leave(mode: TorchDispatchMode) -> None:
    """Exit `mode`, if it is one of this thread's; those that the script has entered since stay."""
    if is_on(mode):
        with _put_aside(down_to=mode):
            mode.__exit__(None, None, None)


@contextlib.contextmanager
def _put_aside(down_to: TorchDispatchMode | None = None) -> Iterator[None]:
    """Modes that are on now, down to `down_to`, are off in here and on again afterwards, above what has been entered."""
    with contextlib.ExitStack() as aside:
        while (mode := current_mode()) is not down_to and mode is not None:
            aside.enter_context(pop_mode_temporarily())
        yield
