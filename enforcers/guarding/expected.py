"""How many bytes an op is about to make.

As many as the last time, where its inputs had as many bytes. Where they had not (sentences of all lengths), products of matrices,
element-wise ops, rows that are picked and images of another size tell by their shapes; of other ops many make a part of what they read,
whatever the size; the rest is asked by running it on tensors without bytes, which takes from 0.1 ms to several.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memopt.enforcers.guarding.live_bytes import bytes_of
from memopt.instrument.by_identity import cached_by_identity
from memopt.instrument.modes import NUMBERS
from memopt.instrument.ops import tensors_in
from memopt.instrument.torch_internals import DisableTorchDispatch, tree_map_only

_PRODUCTS = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}
"""Of matrices: where the first of the two is among the arguments."""
_RANGES = ("aten.arange", "aten.range")
"""Ops whose fractions tell how much they make; of others their type does at most."""
_RESIZED = "aten.upsample_", "aten._upsample_"
_PICKED = "aten.index.Tensor"
_SAY_YES_OR_NO = frozenset([
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit",
    "logical_and", "logical_or", "logical_xor", "logical_not",
])  # fmt: skip
"""Element-wise ops that make booleans."""
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

    least: float = math.inf
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
        key = name, taken, _sizes_given(args, kwargs, taken, fractions=name.startswith(_RANGES))
        made = self._made.get(key)
        if made is not None:
            return Op(key, made)
        kind = None
        if taken:
            alike = name, key[2], *[each.dim() for each in tensors]
            kind = self._kinds.setdefault(alike, _Kind())
            if kind.is_known:
                return Op(key, int(kind.most * taken), kind)
        by_shapes = None
        with contextlib.suppress(Exception):  # of a tensor that is not as others are
            by_shapes = _by_shapes(name, func, args, kwargs, tensors)
        if by_shapes is not None:
            return Op(key, by_shapes, kind)
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


def _by_shapes(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> int | None:
    """Bytes that the op will make, where its inputs, which are `tensors`, tell without asking it."""
    first = _PRODUCTS.get(name)
    if first is not None:
        return _of_a_product(args[first], args[first + 1])
    if not tensors or kwargs or any(each.layout is not torch.strided or each.is_nested for each in tensors):
        return None
    if name.startswith(_RESIZED):
        image: Tensor = args[0]
        shape: list[int] = args[2] if "backward" in name else [*image.shape[:2], *args[1]]
        return math.prod(shape) * image.element_size()
    if name == _PICKED:
        return _of_picked(args[0], args[1])
    if _is_element_wise(func):
        return _of_element_wise(func, tensors)
    return None


@cached_by_identity
def _is_element_wise(func: Any) -> bool:
    """Does it make one tensor, each of whose elements is of one element of each input?"""
    schema = func._schema
    return torch.Tag.pointwise in func.tags and not schema.is_mutable and len(schema.returns) == 1


def _of_element_wise(func: Any, tensors: list[Tensor]) -> int:
    shapes = [each.shape for each in tensors]
    most = max(map(len, shapes))
    count = 1
    for back in range(1, most + 1):
        count *= max([shape[-back] for shape in shapes if len(shape) >= back])
    if func.overloadpacket.__name__ in _SAY_YES_OR_NO:
        return count
    return count * max([each.element_size() for each in tensors if each.dim() > 0 or most == 0])


def _of_picked(tensor: Tensor, places: list[Tensor | None]) -> int:
    """Rows of `tensor`; where those that are picked are told by yes and no, as many as there are."""
    found = [each for each in places if each is not None]
    if any(each.dtype in (torch.bool, torch.uint8) for each in found):
        return tensor.nbytes
    rest = [size for at, size in enumerate(tensor.shape) if at >= len(places) or places[at] is None]
    picked = torch.broadcast_shapes(*[each.shape for each in found])
    return math.prod((*picked, *rest)) * tensor.element_size()


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


def _sizes_given(
    args: tuple[Any, ...], kwargs: dict[str, Any], taken: int, *, fractions: bool
) -> tuple[Any, ...]:
    """Of the arguments of an op whose inputs have `taken` bytes those that are lists of numbers (`zeros`, `repeat`), and the data type; where it has
    no inputs, whole numbers as well (`arange`), and the types of others, or, with `fractions`, these themselves."""
    lists = [tuple(each) for each in args if type(each) is list and each and type(each[0]) is int]
    dtype = kwargs.get("dtype") if kwargs else None
    if taken:
        return tuple(lists) if dtype is None else (*lists, dtype)
    numbers = [each for each in args if type(each) in NUMBERS]
    return (*lists, *[each if fractions or type(each) is int else type(each) for each in numbers], dtype)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
