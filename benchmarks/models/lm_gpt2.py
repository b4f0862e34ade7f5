"""GPT-2 and its relatives (DistilGPT-2, Cerebras-GPT): fused attention, one product for queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lm_parts import Output, fused_attention, gelu_new, mask_unless_full, next_token_loss, split_heads


class Projection(nn.Module):
    """A linear layer with its weight the other way round (GPT-2's `Conv1D`)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.zeros(out))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, positions: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = Projection(width, 3 * width), Projection(width, width)
        triangle = torch.ones((positions, positions), dtype=torch.bool).tril()
        self.register_buffer("bias", triangle.view(1, 1, positions, positions), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        mixed = self.out(fused_attention(query, key, value, mask, self.dropout if self.training else 0.0))
        return F.dropout(mixed, self.dropout, self.training), (key, value)


class Block(nn.Module):
    def __init__(
        self, width: int, heads: int, inner: int, positions: int, dropout: float, exact_gelu: bool
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.activation = F.gelu if exact_gelu else gelu_new
        self.norm1, self.attend = nn.LayerNorm(width), Attention(width, heads, positions, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = Projection(width, inner), Projection(inner, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, past = self.attend(self.norm1(x), mask)
        x = mixed + x
        hidden = self.down(self.activation(self.up(self.norm2(x))))
        hidden = F.dropout(hidden, self.dropout, self.training)
        return x + hidden, past


class GPT2(nn.Module):
    """The causal language model, with the output layer tied to the embedding."""

    def __init__(
        self, *, vocab: int = 50257, width: int = 768, layers: int = 12, heads: int = 12, positions: int = 1024,
        dropout: float = 0.1, exact_gelu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout = dropout
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, positions, dropout, exact_gelu) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def body(self, ids: Tensor, kept: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        embedded = self.tokens(ids)
        x = embedded + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        mask = mask_unless_full(kept, x)
        x = F.dropout(x, self.dropout, self.training)
        past = []
        for block in self.blocks:
            x, pair = block(x, mask)
            past.append(pair)
        return self.norm(x), past

    def forward(self, ids: Tensor, kept: Tensor, labels: Tensor) -> Output:
        hidden, past = self.body(ids, kept)
        logits = self.head(hidden)
        return Output(next_token_loss(logits, labels), logits, past)
