"""Dispatch modes of memopt's lie below those of the script: a `with` of the script exits the innermost mode, whosever it is."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self

from memopt.instrument.torch_internals import (
    TorchDispatchMode,
    current_mode,
    current_modes,
    pop_mode,
    pop_mode_temporarily,
    push_mode,
    set_compiler,
)


class Mode(TorchDispatchMode):
    """What all modes of memopt's have in common: torch.compile compiles under them, and compiles nothing of them.

    Torch sees to the second by `torch._disable_dynamo`, which imports all of torch's compiler, seconds of it, at the first op, and
    costs each op a microsecond or two. Here only its innermost part is called, which is there without that import.

    Torch also notes in flags of the whole process that modes are on, and at the end of each puts back what they were at its beginning:
    wrong where modes, or threads with modes, end in another order than they began. torch.compile asks them, and gives up where they
    stay set. They are about modes under which it compiles nothing, and these are none.
    """

    def __enter__(self) -> Self:
        push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile: under any other mode it would run the model eagerly."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        compiler = set_compiler(None)
        try:
            return self.dispatch(func, types, args, kwargs or {})
        finally:
            if compiler is not None:
                set_compiler(compiler)

    @abstractmethod
    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, and give what it gives."""


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
