"""What the language models of `language_models.py` share, as transformers 4.51 computes it in PyTorch's own operators.

In all of them the order of parameters, the place of the buffers and which names still hold a tensor are transformers' too:
what the allocator reserves depends on them by a percent. Each `body` holds on to the embeddings until the head's turn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Output(NamedTuple):
    """What a training loop keeps until the next iteration's forward has ended: the logits, and keys and values of every layer."""

    loss: Tensor
    logits: Tensor
    past: list[tuple[Tensor, Tensor]]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in fp32; the labels move instead of the logits, which are then not copied."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), shifted.view(-1), ignore_index=-100)


def additive_mask(kept: Tensor, hidden: Tensor) -> Tensor:
    """`[batch, 1, length, length]`: the lowest number where a key is later than the query or padding."""
    length = hidden.shape[1]
    lowest = torch.finfo(hidden.dtype).min
    mask = torch.full((length, length), lowest, dtype=hidden.dtype, device=hidden.device).triu(1)
    mask = mask[None, None].expand(hidden.shape[0], 1, -1, -1).clone()
    padding = (mask + kept[:, None, None, :]) == 0
    return mask.masked_fill(padding, lowest)


def mask_unless_full(kept: Tensor, hidden: Tensor) -> Tensor | None:
    """No mask, and causal attention, for a batch without padding."""
    return None if bool((kept == 1).all()) else additive_mask(kept, hidden)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[batch, length, width]` to `[batch, heads, length, width / heads]`, a view."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0, groups: int = 1
) -> Tensor:
    """Scaled dot product attention with repeated key and value heads and contiguous copies; `[batch, length, width]`."""
    if groups > 1:
        key, value = repeat_heads(key, groups), repeat_heads(value, groups)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
    )
    return mixed.transpose(1, 2).contiguous().flatten(2)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, -1, length, width)


def gelu_new(x: Tensor) -> Tensor:
    """GPT-2's tanh approximation, spelled out: each step is an op that saves its input."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class RMSNorm(nn.Module):
    """Llama's, spelled out in fp32; T5's and Gemma's differ in what is scaled when, not in what is saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(kind)


class Rotary(nn.Module):
    """Cosines and sines `[1, length, dims]` of every position."""

    def __init__(self, dims: int, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("inverse", base ** -(torch.arange(0, dims, 2).float() / dims), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1], device=x.device)[None, None, :].float()
        angles = (self.inverse[None, :, None].float() @ positions).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `[batch, heads, length, dims]`."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
