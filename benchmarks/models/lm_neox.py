"""GPT-NeoX as Pythia uses it: a quarter of each head rotates, attention and feed-forward run side by side, nothing is tied."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lm_parts import Output, Rotary, fused_attention, mask_unless_full, next_token_loss, rotate


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(
        self, x: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        qkv = self.qkv(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2)
        query, key, value = qkv.chunk(3, -1)
        dims = cos.shape[-1]
        turned_query, turned_key = rotate(query[..., :dims], cos, sin), rotate(key[..., :dims], cos, sin)
        query = torch.cat((turned_query, query[..., dims:]), dim=-1)
        key = torch.cat((turned_key, key[..., dims:]), dim=-1)
        del turned_query, turned_key
        return self.out(fused_attention(query, key, value, mask)), (key, value)

    def forward(
        self, x: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, past = self.attend(self.norm1(x), mask, cos, sin)
        hidden = self.down(F.gelu(self.up(self.norm2(x))))
        return hidden + mixed + x, past


class NeoX(nn.Module):
    """The causal language model, without dropout."""

    def __init__(self, *, vocab: int = 50304, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.rotary = Rotary(width // heads // 4)
        self.head = nn.Linear(width, vocab, bias=False)

    def body(self, ids: Tensor, kept: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = embedded = self.tokens(ids)
        mask = mask_unless_full(kept, embedded)
        cos, sin = self.rotary(x)
        past = []
        for block in self.blocks:
            x, pair = block(x, mask, cos, sin)
            past.append(pair)
        return self.norm(x), past

    def forward(self, ids: Tensor, kept: Tensor, labels: Tensor) -> Output:
        hidden, past = self.body(ids, kept)
        logits = self.head(hidden)
        return Output(next_token_loss(logits, labels), logits, past)
