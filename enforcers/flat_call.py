"""A call's arguments as one flat list, and back: lists that hold tensors are taken apart, all else stays whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memopt.instrument.torch_internals import TreeSpec, tree_flatten, tree_unflatten


@dataclass(slots=True)
class CallForm:
    """How a flat list becomes positional and named arguments again."""

    positional: int
    names: tuple[str, ...]
    tree: TreeSpec | None = None
    """Where tensors lay in lists; torch's own flattening in Python takes ten times as long."""

    def rebuild(self, flat: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments, from as many items as flattening gave."""
        if self.tree is not None:
            args, kwargs = tree_unflatten(flat, self.tree)
            return args, kwargs
        return tuple(flat[: self.positional]), dict(zip(self.names, flat[self.positional :], strict=True))


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], CallForm]:
    """The arguments of an overload's call, tensors never inside lists, and how to put them back."""
    flat = [*args, *kwargs.values()]
    for argument in flat:
        if isinstance(argument, (list, tuple)) and any(isinstance(part, Tensor) for part in argument):
            leaves, tree = tree_flatten((args, kwargs))
            return leaves, CallForm(0, (), tree)
    return flat, CallForm(len(args), tuple(kwargs))
