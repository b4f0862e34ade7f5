"""A call's arguments as one flat list, and back: lists that hold tensors are taken apart, all else stays whole."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from torch import Tensor


class CallForm(Struct, frozen=True, gc=False):
    """How a flat list becomes positional and named arguments again."""

    positional: int
    names: tuple[str, ...]
    lists: tuple[tuple[int, int], ...] = ()
    """(place among the arguments, items) of each list that was taken apart, in order. No schema has lists of lists of tensors."""

    def rebuild(self, flat: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments, from as many items as flattening gave."""
        if self.lists:
            flat = self._put_together(flat)
        if not self.names:
            return tuple(flat), {}
        return tuple(flat[: self.positional]), dict(zip(self.names, flat[self.positional :], strict=True))

    def _put_together(self, flat: list[Any]) -> list[Any]:
        arguments: list[Any] = []
        taken = 0
        for place, count in self.lists:
            before = place - len(arguments)
            arguments += flat[taken : taken + before]
            taken += before + count
            arguments.append(flat[taken - count : taken])
        return arguments + flat[taken:]


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], CallForm]:
    """The arguments of an overload's call, tensors never inside lists, and how to put them back."""
    given = [*args, *kwargs.values()] if kwargs else [*args]
    lists = tuple(
        [
            (place, len(argument))
            for place, argument in enumerate(given)
            if isinstance(argument, (list, tuple)) and any(isinstance(part, Tensor) for part in argument)
        ]
    )
    form = CallForm(len(args), tuple(kwargs), lists)
    if not lists:
        return given, form
    apart = {place for place, _ in lists}
    flat = [
        part for place, argument in enumerate(given) for part in (argument if place in apart else (argument,))
    ]
    return flat, form
