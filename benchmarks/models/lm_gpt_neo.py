"""GPT-Neo: eager attention in fp32, every other layer within a window of 256 tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lm_parts import Output, additive_mask, gelu_new, next_token_loss, split_heads

WINDOW = 256


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, positions: int, local: bool) -> None:
        super().__init__()
        self.heads = heads
        triangle = torch.ones((positions, positions), dtype=torch.bool).tril()
        if local:
            triangle = torch.bitwise_xor(triangle, triangle.tril(-WINDOW))
        self.register_buffer("bias", triangle.view(1, 1, positions, positions), persistent=False)
        self.k, self.v, self.q = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = self.q(x), self.k(x), self.v(x)
        query, key, value = (split_heads(part, self.heads) for part in (query, key, value))
        scores = torch.matmul(query.to(torch.float32), key.to(torch.float32).transpose(-1, -2))
        lowest = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        scores = torch.where(self.bias[:, :, : x.shape[1], : x.shape[1]], scores, lowest)
        scores = scores + mask
        scores = F.softmax(scores, dim=-1).to(value.dtype)
        mixed = torch.matmul(scores, value).permute(0, 2, 1, 3).contiguous()
        return self.out(mixed.flatten(2)), (key, value)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, positions: int, local: bool) -> None:
        super().__init__()
        self.norm1, self.attend = nn.LayerNorm(width), Attention(width, heads, positions, local)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, past = self.attend(self.norm1(x), mask)
        x = mixed + x
        hidden = self.down(gelu_new(self.up(self.norm2(x))))
        return x + hidden, past


class GPTNeo(nn.Module):
    """The causal language model, with the output layer tied to the embedding and no dropout."""

    def __init__(
        self, *, vocab: int = 50257, width: int = 768, layers: int = 12, heads: int = 12, positions: int = 2048
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, positions, local=index % 2 == 1) for index in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def body(self, ids: Tensor, kept: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        embedded = self.tokens(ids)
        mask = additive_mask(kept, embedded)
        x = embedded + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        past = []
        for block in self.blocks:
            x, pair = block(x, mask)
            past.append(pair)
        return self.norm(x), past

    def forward(self, ids: Tensor, kept: Tensor, labels: Tensor) -> Output:
        hidden, past = self.body(ids, kept)
        logits = self.head(hidden)
        return Output(next_token_loss(logits, labels), logits, past)
