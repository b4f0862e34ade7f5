"""Composite operators as they run on real tensors: C++ takes other branches for tensor subclasses, which fake tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.instrument.script.unheard import unheard

aten: Any = torch.ops.aten


class Overrides:
    """Kernels replaced in the dispatcher until `close`."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def add(self, name: str, function: Callable[..., Any], key: str = "CompositeImplicitAutograd") -> None:
        """Replace the kernel of `aten::name` for `key`."""
        with unheard():
            self._library.impl(name, function, key, allow_override=True)

    def close(self) -> None:
        """Put every kernel back."""
        self._library._destroy()


def plain_choices(overrides: Overrides) -> None:
    """What any device does with plain tensors."""
    overrides.add("linear", _linear)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """ATen/native/Linear.cpp, without its out-of-place branch for subclasses."""
    dims = input.dim()
    if bias is None:
        return torch.matmul(input, weight.t())
    if dims == 2:
        return torch.addmm(bias, input, weight.t())
    if dims == 3 and input.is_contiguous() and bias.dim() == 1:
        flat = input.view(-1, input.shape[2])
        return torch.addmm(bias, flat, weight.t()).view(*input.shape[:2], weight.shape[0])
    return torch.matmul(input, weight.t()).add_(bias)
