"""Results of a CPU's kernels lie as they do on real tensors, whatever layout the input has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memopt.estimators.fake.recorder import FakeRecorder

Tensor = torch.Tensor
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 8, 6, 6),
    "channels last": lambda: torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last),
    "some channels": lambda: torch.randn(4, 16, 6, 6).contiguous(memory_format=torch.channels_last)[:, :8],
    "heads": lambda: torch.randn(4, 6, 8, 6).transpose(1, 2),
    "transposed": lambda: torch.randn(4, 6, 8).transpose(1, 2),
    "swapped": lambda: torch.randn(8, 4, 6).transpose(0, 1),
    "three dimensions": lambda: torch.randn(2, 8, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d),
    "trivial": lambda: torch.randn(4, 1, 6, 6),
}
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "running": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    "roll": lambda x: x.roll(1, 1),
    "shuffle": lambda x: torch.channel_shuffle(x, 1) if x.dim() == 4 else x,
    "reflection": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect") if x.dim() == 4 else x,
    "gated": lambda x: F.glu(x, -1),
    "noisy": lambda x: F.rrelu(x, training=True),
}


def laid_out(op: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """Strides of the result and, found in a hook before anything is accumulated, of the gradient."""
    seen: list[Any] = []
    leaf = x.detach().requires_grad_()
    leaf.register_hook(lambda gradient: seen.append(gradient.stride()))
    y = op(leaf)
    seen.append(y.stride())
    y.backward(torch.ones_like(y))
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_a_result_lies_as_the_kernels(op: str, layout: str) -> None:
    real = LAYOUTS[layout]()
    found = laid_out(OPS[op], real)
    with FakeRecorder("cpu") as recorder:
        base = recorder.fake((real.untyped_storage().nbytes() // 4,))
        assert laid_out(OPS[op], base.as_strided(real.shape, real.stride())) == found
