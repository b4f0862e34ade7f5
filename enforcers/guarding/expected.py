"""How many bytes an op is about to make.

As many as the last time, where its inputs had as many bytes. Where they had not (sentences of all lengths), a product of matrices tells by
its shapes; of other ops many make a part of what they read, whatever the size; the rest is asked by running it on tensors without
bytes, which takes up to a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from memopt.enforcers.guarding.live_bytes import bytes_of
from memopt.instrument.modes import NUMBERS
from memopt.instrument.ops import tensors_in
from memopt.instrument.torch_internals import DisableTorchDispatch, tree_map_only

_PRODUCTS = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}
"""Of matrices: where the first of the two is among the arguments."""
_SEEN = 3
"""Calls with other sizes that made the same part of what they read: so will the next."""
_SAME = 0.01

Key = tuple[str, int, tuple[Any, ...]]
"""Overload, bytes of its inputs, sizes that it is given as numbers, and data type: calls of one key make as much."""


@dataclass(slots=True, eq=False)
class Op:
    """A call that is about to run."""

    key: Key
    makes: int
    kind: _Kind | None = None
    """Where its key is new."""
    shown: int = 0
    """What its shapes said; 0 where they were not asked."""


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of an overload on tensors of as many dimensions, with the same lists of numbers and data type."""

    least: float = inf
    most: float = 0.0
    seen: int = 0

    def made(self, share: float) -> None:
        """Of what one has read."""
        self.least, self.most, self.seen = min(self.least, share), max(self.most, share), self.seen + 1

    @property
    def is_known(self) -> bool:
        return self.seen >= _SEEN and self.most <= (1 + _SAME) * self.least


class Expected:
    """Of the ops of one run."""

    def __init__(self) -> None:
        self._made: dict[Key, int] = {}
        """Bytes, the last time."""
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._beyond: dict[str, float] = {}
        """Overload -> how many times as much it made as its shapes say, where it keeps what only its kernel knows of (recurrent layers)."""

    def of(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        """The op `name` is about to run on these."""
        tensors = tensors_in((*args, *kwargs.values()) if kwargs else args)
        taken = bytes_of(tensors)
        key = name, taken, _sizes_given(args, kwargs, taken)
        made = self._made.get(key)
        if made is not None:
            return Op(key, made)
        kind = None
        if taken:
            alike = name, key[2], *[each.dim() for each in tensors]
            kind = self._kinds.setdefault(alike, _Kind())
            if kind.is_known:
                return Op(key, int(kind.most * taken), kind)
        first = _PRODUCTS.get(name)
        if first is not None:
            return Op(key, _of_a_product(args[first], args[first + 1]), kind)
        shown = _would_make(func, args, kwargs, tensors)
        return Op(key, int(shown * self._beyond.get(name, 1.0)), kind, shown)

    def made(self, op: Op, size_bytes: int) -> None:
        """It has run."""
        self._made[op.key] = size_bytes
        if op.kind is not None:
            op.kind.made(size_bytes / op.key[1])
        if size_bytes > op.shown > 0:
            self._beyond[op.key[0]] = size_bytes / op.shown

    def last(self, key: Key) -> int:
        """Bytes that a call of this key made the last time."""
        return self._made[key]


def _of_a_product(first: Tensor, second: Tensor) -> int:
    return first.numel() // max(1, first.size(-1)) * second.size(-1) * first.element_size()


def _would_make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> int:
    """Bytes of the new tensors that the op will make, from shapes alone; where it cannot be asked, as many as it reads, which are `tensors`."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return bytes_of(tensors)  # a kernel of the script's might run, or draw random numbers
    guard = DisableTorchDispatch()
    try:
        shapes = partial(tree_map_only, Tensor, _on_meta)
        is_new = "device" in kwargs or not tensors
        given = shapes((args, {**kwargs, "device": "meta"} if is_new else kwargs))
        known = {id(each) for each in tensors_in(given)}
        out = func(*given[0], **given[1])
        return bytes_of([each for each in tensors_in((out,)) if id(each) not in known])
    except Exception:
        return bytes_of(tensors)
    finally:
        del guard


def _sizes_given(args: tuple[Any, ...], kwargs: dict[str, Any], taken: int) -> tuple[Any, ...]:
    """Of the arguments of an op whose inputs have `taken` bytes those that are lists of numbers (`zeros`, `repeat`), and the data type; where it has
    no inputs, numbers as well (`arange`)."""
    lists = [tuple(each) for each in args if type(each) is list and each and type(each[0]) is int]
    dtype = kwargs.get("dtype") if kwargs else None
    if taken:
        return tuple(lists) if dtype is None else (*lists, dtype)
    return (*lists, *[each for each in args if type(each) in NUMBERS], dtype)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
