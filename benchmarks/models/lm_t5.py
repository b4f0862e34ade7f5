"""T5: an encoder and a decoder with eager attention and one learned bias by distance, shared by the layers of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lm_parts import Output, RMSNorm, additive_mask, gelu_new, split_heads

BUCKETS = 32


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dims: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm = RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, heads * dims, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * dims, width, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        normed = self.norm(x)
        source = normed if memory is None else memory
        query, key, value = (
            split_heads(part, self.heads) for part in (self.q(normed), self.k(source), self.v(source))
        )
        scores = torch.matmul(query, key.transpose(3, 2))
        scores += bias
        weights = F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), self.dropout, self.training)
        mixed = torch.matmul(weights, value).transpose(1, 2).contiguous().flatten(2)
        return x + F.dropout(self.out(mixed), self.dropout, self.training), (key, value)


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int, gated: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = RMSNorm(width)
        self.up = nn.Linear(width, inner, bias=False)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = (
            F.relu(self.up(hidden)) if self.gate is None else gelu_new(self.gate(hidden)) * self.up(hidden)
        )
        hidden = self.down(F.dropout(hidden, self.dropout, self.training))
        return x + F.dropout(hidden, self.dropout, self.training)


class Stack(nn.Module):
    """Encoder or decoder; a decoder's layers also attend to `memory`."""

    def __init__(
        self, width: int, inner: int, layers: int, heads: int, dims: int, gated: bool, dropout: float, decodes: bool
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout = dropout
        self.distances = nn.Embedding(BUCKETS, heads)
        halves = 2 if decodes else 1
        self.attention = nn.ModuleList(
            nn.ModuleList(Attention(width, heads, dims, dropout) for _ in range(halves))
            for _ in range(layers)
        )
        self.feed_forward = nn.ModuleList(FeedForward(width, inner, gated, dropout) for _ in range(layers))
        self.norm = RMSNorm(width)

    def bias(self, x: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        buckets = (places[None] - places[:, None]).abs().clamp(max=BUCKETS - 1)
        return self.distances(buckets).permute(2, 0, 1).unsqueeze(0) + mask

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = F.dropout(x, self.dropout, self.training)
        bias = self.bias(x, mask)
        over = None if memory is None else _no_bias(x, memory, self.distances.embedding_dim) + memory_mask
        past = []
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x, pair = attention[0](x, bias, None)
            past.append(pair)
            if memory is not None:
                x, pair = attention[1](x, over, memory)
                past.append(pair)
            x = feed_forward(x)
        return F.dropout(self.norm(x), self.dropout, self.training), past


def _no_bias(x: Tensor, memory: Tensor, heads: int) -> Tensor:
    return torch.zeros((1, heads, x.shape[1], memory.shape[1]), device=x.device, dtype=x.dtype)


class T5(nn.Module):
    """The model that writes one sequence after reading another. `gated`: version 1.1 and FLAN, whose output layer is not tied."""

    def __init__(
        self, *, vocab: int = 32128, width: int, inner: int, layers: int, heads: int, dims: int = 64,
        dropout: float = 0.1, gated: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        given = (width, inner, layers, heads, dims, gated, dropout)
        self.encoder, self.decoder = Stack(*given, decodes=False), Stack(*given, decodes=True)
        self.head = nn.Linear(width, vocab, bias=False)
        self.tied = not gated
        if self.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, kept: Tensor, labels: Tensor) -> Output:
        x = self.tokens(ids)
        padding = (1.0 - kept[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        memory = self.encoder(x, padding)[0]
        shifted = torch.zeros_like(labels)
        shifted[:, 1:] = labels[:, :-1].clone()
        y = self.tokens(shifted.masked_fill(shifted == -100, 0))
        y, past = self.decoder(y, additive_mask(torch.ones_like(shifted), y), memory, padding)
        logits = self.head(y * y.shape[-1] ** -0.5 if self.tied else y)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
        return Output(loss, logits, past)
