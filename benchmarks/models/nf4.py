"""Memory of bitsandbytes' 4-bit linear layer (0.41), with operators that any torch has: the numbers it computes mean nothing.

A weight is half a byte an element and one fp32 scale for 64 of them; `nf4-dq` keeps these scales in a byte, with an fp32
scale for 256. Each use unpacks the weight into fp16 (the layer halves what it is given) and from there into the input's type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK, NESTED = 64, 256


class _Product(torch.autograd.Function):
    """`x @ weight.T`; keeps its input although the frozen weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, out: int) -> Tensor:
        ctx.kept, ctx.out = (x, packed), out
        return torch.matmul(x, unpacked(packed, out, x.dtype).t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return torch.matmul(grad, unpacked(ctx.kept[1], ctx.out, grad.dtype)), None, None


def unpacked(packed: Tensor, out: int, kind: torch.dtype) -> Tensor:
    """`[out, width]` of `kind`, by way of fp16."""
    half = torch.empty((out, packed.numel() * 2 // out), dtype=torch.float16, device=packed.device)
    return half.to(kind)


class Linear4bit(nn.Module):
    """A frozen linear layer in `nf4` or `nf4-dq`."""

    def __init__(self, width: int, out: int, biased: bool, mode: str) -> None:
        super().__init__()
        self.out = out
        scales = width * out // BLOCK
        self.register_buffer("packed", torch.empty(width * out // 2, dtype=torch.uint8))
        if mode == "nf4":
            self.register_buffer("scales", torch.empty(scales, dtype=torch.float32))
        else:
            self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8))
            self.register_buffer("nested", torch.empty(scales // NESTED, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(out), requires_grad=False) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        product = _Product.apply(x, self.packed, self.out)
        return product if self.bias is None else product + self.bias
