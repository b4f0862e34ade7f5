"""What runs eagerly in place of a compiled program takes the branches of compiled code, where a library asks `torch.compiler`.

transformers writes masks out and repeats keys and values where it is compiled, and leaves both to the kernel where it is not.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

# torch as something to be patched
_COMPILER: Any = torch.compiler


class Compiling:
    """Calls a function, or a module's forward, as one that is being compiled."""

    depth: ClassVar[int] = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiling:
        return Compiling(copy.deepcopy(self.function, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Compiling.depth += 1
        try:
            return self.function(*args, **kwargs)
        finally:
            Compiling.depth -= 1


def compiling(model: Any) -> Any:
    """`model`, whose calls are told that they are compiled; optimizers' own code is left alone, as is what is no code of a script."""
    if isinstance(model, torch.nn.Module):
        if not isinstance(model.forward, Compiling):
            model.forward = Compiling(model.forward)
        return model
    owner = getattr(model, "__self__", None)
    return model if isinstance(owner, torch.optim.Optimizer) or not callable(model) else Compiling(model)


def install() -> None:
    """Patch `torch.compiler` in this process, for good."""
    asked = _COMPILER.is_compiling
    _COMPILER.is_compiling = lambda: bool(Compiling.depth) or asked()
