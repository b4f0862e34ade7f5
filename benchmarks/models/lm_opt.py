"""OPT: fused attention on views (no contiguous copies), ReLU; the 350M one projects its embedding and norms after the sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lm_parts import Output, mask_unless_full, next_token_loss, split_heads


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.norm_first = heads, dropout, norm_first
        self.k, self.v, self.q, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query = split_heads(self.q(x), self.heads)
        key, value = self.k(x), self.v(x)
        key, value = split_heads(key, self.heads), split_heads(value, self.heads)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).contiguous().flatten(2)), (key, value)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, past = self.attend(self.norm1(x) if self.norm_first else x, mask)
        mixed = F.dropout(mixed, self.dropout, self.training)
        x = x + mixed
        del mixed
        shape = x.shape
        x = (x if self.norm_first else self.norm1(x)).reshape(-1, shape[-1])
        hidden = self.down(F.relu(self.up(self.norm2(x) if self.norm_first else x)))
        hidden = F.dropout(hidden, self.dropout, self.training)
        x = (x + hidden).view(shape)
        return x if self.norm_first else self.norm2(x), past


class OPT(nn.Module):
    """The causal language model, with the output layer tied to the embedding."""

    def __init__(
        self, *, vocab: int = 50272, width: int = 768, layers: int = 12, heads: int = 12, positions: int = 2048,
        dropout: float = 0.1, embedding: int = 0, norm_first: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        narrow = embedding or width
        self.tokens, self.positions = nn.Embedding(vocab, narrow), nn.Embedding(positions + 2, width)
        self.narrow = nn.Linear(width, narrow, bias=False) if narrow != width else nn.Identity()
        self.widen = nn.Linear(narrow, width, bias=False) if narrow != width else nn.Identity()
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, dropout, norm_first) for _ in range(layers))
        self.head = nn.Linear(narrow, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def body(self, ids: Tensor, kept: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        embedded = self.tokens(ids)
        mask = mask_unless_full(kept, embedded)
        places = (torch.cumsum(kept, dim=1) * kept - 1).long() + 2
        x = self.widen(embedded) + self.positions(places)
        past = []
        for block in self.blocks:
            x, pair = block(x, mask)
            past.append(pair)
        return self.narrow(self.norm(x)), past

    def forward(self, ids: Tensor, kept: Tensor, labels: Tensor) -> Output:
        hidden, past = self.body(ids, kept)
        logits = self.head(hidden)
        return Output(next_token_loss(logits, labels), logits, past)
