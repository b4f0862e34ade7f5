"""An optimizer's parameters and state, looked at: how they lie in memory, in which order, and whether anybody else holds them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from memopt.instrument.stepping.in_pieces import State, lies_like
from memopt.instrument.stepping.single_parameter_step import is_stepped, parameters_of
from memopt.instrument.torch_internals import storage_use_count


def trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for _, each in parameters_of(optimizer) if is_stepped(optimizer, each)]


def layout_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What the pieces depend on: any of it may change between two steps (`p.data = ...`, `channels_last`, other groups)."""
    return tuple(
        (number, id(each), each.shape, each.stride(), each.dtype, each.device)
        for number, group in enumerate(optimizer.param_groups)
        for each in group["params"]
        if is_stepped(optimizer, each)
    )


def is_of_elements(value: Tensor, parameter: Tensor) -> bool:
    return value.numel() == parameter.numel() and value.dim() > 0 and lies_like(value, parameter)


def nobody_else_holds(inner: State, parameter: Tensor) -> bool:
    """Is the state ours to move, and does it lie as the parameter does?"""
    for name in list(inner):
        value = inner[name]
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if not is_of_elements(value, parameter):
            return False
        if sys.getrefcount(value) > 3 or storage_use_count(value.untyped_storage()._cdata) > 2:
            return False  # a name here, the call, and the state; the tensor, and who asks
    return True


def as_it_lies(gradient: Tensor, parameter: Tensor) -> Tensor:
    """`gradient` with its elements where the parameter has them."""
    if lies_like(gradient, parameter):
        return gradient
    same = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
    )
    return same.copy_(gradient)


def put_in_order(inner: State | None, names: tuple[str, ...] | None) -> None:
    """As the optimizer made it: a checkpoint has its entries in this order."""
    if inner is None or names is None or tuple(inner) == names:
        return
    known = {name: inner[name] for name in names if name in inner} | inner
    if tuple(known) == tuple(inner):
        return
    inner.clear()
    inner.update(known)
