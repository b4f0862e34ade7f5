"""Dispatch modes of memopt's lie below those of the script: a `with` of the script exits the innermost mode, whosever it is. What torch.jit
traces has none of them on."""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

from memopt.instrument import saved
from memopt.instrument.torch_internals import (
    JIT_TRACERS,
    Gone,
    TensorType,
    TorchDispatchMode,
    current_mode,
    current_modes,
    numbers_are_tensors,
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
        if args and type(args[0]) in NUMBERS:
            args = _as_tensors(func, args)
        compiler = set_compiler(None)
        try:
            return self.dispatch(func, types, args, kwargs or {})
        finally:
            if compiler is not None:
                set_compiler(compiler)

    @abstractmethod
    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, and give what it gives."""


NUMBERS = frozenset({int, float, bool, complex})


def _as_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """TorchScript has the sizes and constants that a trace computes with in tensors, which a mode is handed as numbers; most ops take none."""
    if numbers_are_tensors(func.overloadpacket.__name__):
        return args
    return tuple(
        torch.tensor(each, device="cpu")
        if type(each) in NUMBERS and isinstance(wanted.type, TensorType)
        else each
        for each, wanted in zip(args, func._schema.arguments, strict=False)
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


def leave_if_innermost(mode: TorchDispatchMode) -> None:
    """Exit `mode`, if the script has entered none above it; those of memopt's stay."""
    for each in reversed(current_modes()):
        if each is mode:
            leave(mode)
        if each is mode or not isinstance(each, Mode):
            return


@contextlib.contextmanager
def none_of_ours() -> Iterator[None]:
    """No mode of memopt's is on in here; those of the script are."""
    scripts = [each for each in current_modes() if not isinstance(each, Mode)]
    with _put_aside():
        for each in scripts:
            push_mode(each)
        try:
            yield
        finally:
            for _ in scripts:
                pop_mode()


def keep_out_of_traces() -> None:
    """Let torch.jit trace without memopt's modes and hooks, from here on. Under any mode it loses ops: what a convolution gives became a
    constant of the trace."""
    for place in JIT_TRACERS:
        original = place.get()
        if not (isinstance(original, Gone) or hasattr(original, "__wrapped__")):
            place.put(_without_us(original))


def _without_us(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def trace(*args: Any, **kwargs: Any) -> Any:
        with none_of_ours(), saved.none_of_ours():
            return original(*args, **kwargs)

    return trace


@contextlib.contextmanager
def _put_aside(down_to: TorchDispatchMode | None = None) -> Iterator[None]:
    """Modes that are on now, down to `down_to`, are off in here and on again afterwards, above what has been entered."""
    with contextlib.ExitStack() as aside:
        while (mode := current_mode()) is not down_to and mode is not None:
            aside.enter_context(pop_mode_temporarily())
        yield
