"""Composite operators as they run on real tensors: C++ takes other branches for tensor subclasses, which fake tensors are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_LIBRARY = torch.library.Library("aten", "IMPL")
_DONE: set[str] = set()


def override(name: str, function: Callable[..., Any], key: str = "CompositeImplicitAutograd") -> None:
    """Replace the kernel of `aten::name` in this process, for good."""
    if (done := f"{name}/{key}") in _DONE:
        return
    _DONE.add(done)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _LIBRARY.impl(name, function, key, allow_override=True)


def plain_choices() -> None:
    """What any device does with plain tensors."""
    override("linear", _linear)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """ATen/native/Linear.cpp, without its out-of-place branch for subclasses."""
    dims = input.dim()
    if bias is None:
        return aten.matmul.default(input, weight.t())
    if dims == 2:
        return aten.addmm.default(bias, input, weight.t())
    if dims == 3 and input.is_contiguous() and bias.dim() == 1:
        flat = input.view(-1, input.shape[2])
        return aten.addmm.default(bias, flat, weight.t()).view(*input.shape[:2], weight.shape[0])
    return aten.matmul.default(input, weight.t()).add_(bias)
