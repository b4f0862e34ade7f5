"""Who reads weights while backward runs, without a mode that sees each op of it.

A node of torch's reads what it has saved, which the saved-tensor hooks hand out, and gradients. All else that reads a weight in backward is
called from Python: a hook on a tensor or a node, a forward that a checkpoint runs again. Such calls are seen by a function mode, which costs
the nodes themselves nothing; the ops in one of them are seen by a dispatch mode, which is on that long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from memopt.instrument import modes
from memopt.instrument.as_plain import as_plain
from memopt.instrument.torch_internals import (
    function_mode_at,
    function_modes,
    pop_function_mode,
    push_function_mode,
)

Told = Callable[[Any, tuple[object, ...], Mapping[str, object]], None]


class PythonReads(TorchFunctionMode):
    """Tells of each op that Python code calls between `begin` and `end`, in the threads of that backward."""

    def __init__(self, told: Told, wanted: Callable[[], bool]) -> None:
        """`told`: (op, args, kwargs), before it runs. Only while it is `wanted`."""
        super().__init__()
        self._ops, self._wanted = _Ops(told), wanted

    def begin(self) -> None:
        push_function_mode(self)

    def end(self) -> None:
        """Does nothing where it has not begun. Those that the script has entered since stay."""
        above = []
        while function_modes() and function_mode_at(function_modes() - 1) is not self:
            above.append(pop_function_mode())
        if function_modes():
            pop_function_mode()
        for mode in reversed(above):
            push_function_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and give what it gives."""
        if getattr(func, "__name__", "") == "__get__" or not self._wanted():  # `tensor.grad` reads no bytes
            return func(*args, **(kwargs or {}))
        modes.enter(self._ops)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            modes.leave(self._ops)


def rest() -> PythonReads | None:
    """Have the one that is on tell of nothing until it is given to `go_on`: of what memopt itself calls. None where none is on."""
    top = function_modes()
    mode = function_mode_at(top - 1) if top else None
    if not isinstance(mode, PythonReads):
        return None
    pop_function_mode()
    return mode


def go_on(rests: PythonReads | None) -> None:
    """End what `rest` began."""
    if rests is not None:
        push_function_mode(rests)


class _Ops(modes.Mode):
    """On while a call of Python's runs."""

    def __init__(self, told: Told) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._told = told

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = as_plain(func)
        self._told(func, args, kwargs)
        return run(*args, **kwargs)
