"""What of an optimizer's state may be elsewhere between two of its steps, whatever its step computes: tensors to which nothing leads but
`optimizer.state`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memopt.instrument.ops import PLAIN_TYPES, is_lent, is_shared
from memopt.instrument.stepping.handed_out import HandedOut, tells_of_looks
from memopt.instrument.stepping.torchs_step import any_group_is
from memopt.instrument.torch_internals import storage_use_count

LEAST_BYTES = 4096
"""Smaller tensors stay."""
_DEEP = 3
"""Lists in lists: statistics of both sides of a matrix (Shampoo, SOAP)."""
_GET: dict[type, Callable[[Any, Any], Any]] = {
    dict: dict.__getitem__,
    HandedOut: dict.__getitem__,
    list: list.__getitem__,
    tuple: tuple.__getitem__,
}


def holders(owner: Any) -> int:
    return sys.getrefcount(owner.state)


ALONE = holders(SimpleNamespace(state=defaultdict(dict)))
"""As many hold a state that its optimizer alone holds."""


def why_state_stays(optimizer: torch.optim.Optimizer, *, is_ours: bool = False) -> str:
    """Why the state must not be away between steps; empty when nothing speaks against it. `is_ours`: what stands in for it tells us of
    whoever looks."""
    state = vars(optimizer).get("state")
    if not isinstance(state, defaultdict) or state.default_factory is not dict:
        return "the optimizer keeps its state in a way of its own"
    if any_group_is(optimizer, "differentiable", "capturable"):
        return "the optimizer is differentiable or capturable"
    del state
    return "" if is_ours or holders(optimizer) == ALONE else "something else holds the optimizer's state"


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Those that nobody else holds and that fill `LEAST_BYTES` or more, each alone in its storage. Looks past whatever stands in for the
    state (`dict`'s own methods)."""
    state: dict[Any, Any] = vars(optimizer)["state"]
    tells = tells_of_looks(state)
    for parameter in list(dict.keys(state)):
        inner = dict.__getitem__(state, parameter)
        is_told = tells and type(inner) is HandedOut  # of whoever reads it
        del inner
        if is_told or _count(dict.__getitem__, state, parameter) <= _ONCE:
            yield from _within(dict.__getitem__(state, parameter), _DEEP)


def _within(owner: Any, deep: int) -> Iterator[Tensor]:
    get = _GET.get(type(owner))
    if get is None or not deep:
        return
    for key in list(dict.keys(owner)) if isinstance(owner, dict) else range(len(owner)):
        if _count(get, owner, key) > _ONCE:
            continue
        value = get(owner, key)
        if type(value) in PLAIN_TYPES:
            if _is_alone(value):
                yield value
        else:
            yield from _within(value, deep - 1)


def _count(get: Callable[[Any, Any], Any], owner: Any, key: Any) -> int:
    value = get(owner, key)
    return sys.getrefcount(value)


_ONCE = _count(list.__getitem__, [object()], 0)
"""As many hold what one container alone holds."""


def held_beside(owner: dict[Any, Any], key: Any) -> int:
    """How many hold what `owner` has there, beside it."""
    return _count(dict.__getitem__, owner, key) - _ONCE


def _is_alone(value: Tensor) -> bool:
    """Has it bytes of its own, which nobody reaches but through it?"""
    if value.layout is not torch.strided or value.requires_grad or value.is_meta:
        return False
    if vars(value):  # torch.compile marks tensors whose address it has learnt by heart
        return False
    storage = value.untyped_storage()
    if storage.nbytes() < LEAST_BYTES or is_lent(storage) or is_shared(storage):
        return False
    return int(storage_use_count(storage._cdata)) <= 2  # the tensor's, and who asks
