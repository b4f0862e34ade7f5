"""Llama, Qwen2, Qwen3 and Gemma 2: rotary positions, RMS norms in fp32, grouped key and value heads, a gated feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lm_parts import (
    Output,
    RMSNorm,
    Rotary,
    additive_mask,
    fused_attention,
    mask_unless_full,
    next_token_loss,
    repeat_heads,
    rotate,
)


class Attention(nn.Module):
    def __init__(
        self, width: int, heads: int, kv: int, dims: int, biased: bool, normed: bool, softcap: float
    ) -> None:
        super().__init__()
        self.dims, self.groups, self.softcap = dims, heads // kv, softcap
        self.q = nn.Linear(width, heads * dims, bias=biased)
        self.k, self.v = (nn.Linear(width, kv * dims, bias=biased) for _ in range(2))
        self.out = nn.Linear(heads * dims, width, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(dims) if normed else nn.Identity() for _ in range(2))

    def forward(
        self, x: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        shape = (*x.shape[:-1], -1, self.dims)
        query = rotate(self.q_norm(self.q(x).view(shape)).transpose(1, 2), cos, sin)
        key = rotate(self.k_norm(self.k(x).view(shape)).transpose(1, 2), cos, sin)
        value = self.v(x).view(shape).transpose(1, 2)
        if self.softcap:
            mixed = self.eager(query, repeat_heads(key, self.groups), repeat_heads(value, self.groups), mask)
        else:
            mixed = fused_attention(query, key, value, mask, groups=self.groups)
        return self.out(mixed), (key, value)

    def eager(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Gemma 2 caps its scores, which no fused kernel does."""
        scores = torch.matmul(query, key.transpose(2, 3)) * self.dims**-0.5
        scores = torch.tanh(scores / self.softcap) * self.softcap
        weights = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value).transpose(1, 2).contiguous().flatten(2)


class Block(nn.Module):
    """`sandwich` (Gemma 2): a norm after each half too."""

    def __init__(self, width: int, inner: int, attention: Attention, sandwich: bool) -> None:
        super().__init__()
        self.attention = attention
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norm1, self.after1 = RMSNorm(width), RMSNorm(width) if sandwich else nn.Identity()
        self.norm2, self.after2 = RMSNorm(width), RMSNorm(width) if sandwich else nn.Identity()
        self.activation = (lambda x: F.gelu(x, approximate="tanh")) if sandwich else F.silu

    def forward(
        self, x: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, past = self.attention(self.norm1(x), mask, cos, sin)
        mixed = self.after1(mixed)
        x = x + mixed
        del mixed
        hidden = self.norm2(x)
        hidden = self.down(self.activation(self.gate(hidden)) * self.up(hidden))
        hidden = self.after2(hidden)
        return x + hidden, past


class Llama(nn.Module):
    """The causal language model. `biased`: Qwen2's queries, keys and values; `normed`: Qwen3's; `softcap`: Gemma 2."""

    def __init__(
        self, *, vocab: int, width: int, inner: int, layers: int, heads: int, kv: int, dims: int = 0,
        tied: bool = True, biased: bool = False, normed: bool = False, softcap: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        dims = dims or width // heads
        self.softcap = softcap
        self.tokens = nn.Embedding(vocab, width)
        cap = 50.0 if softcap else 0.0
        self.blocks = nn.ModuleList(
            Block(width, inner, Attention(width, heads, kv, dims, biased, normed, cap), softcap)
            for _ in range(layers)
        )
        self.norm, self.rotary = RMSNorm(width), Rotary(dims)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def body(self, ids: Tensor, kept: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = embedded = self.tokens(ids)
        mask = additive_mask(kept, x) if self.softcap else mask_unless_full(kept, embedded)
        cos, sin = self.rotary(x)
        if self.softcap:
            x = x * x.shape[-1] ** 0.5
        past = []
        for block in self.blocks:
            x, pair = block(x, mask, cos, sin)
            if not self.softcap:  # Gemma 2 keeps no cache while it trains
                past.append(pair)
        return self.norm(x), past

    def forward(self, ids: Tensor, kept: Tensor, labels: Tensor) -> Output:
        hidden, past = self.body(ids, kept)
        logits = self.head(hidden)
        if self.softcap:
            logits = torch.tanh(logits / 30.0) * 30.0
        return Output(next_token_loss(logits, labels), logits, past)
