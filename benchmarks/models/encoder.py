"""Transformer encoder, the base shape of Vaswani et al. (2017), trained to name every token of a corrupted sentence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    """`nn.TransformerEncoder` (post-norm, ReLU) between an embedding and a linear head."""

    def __init__(
        self, vocab: int, context: int, layers: int, width: int, heads: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        return self.head(self.encoder(x))


def build(
    vocab: int = 8192,
    context: int = 512,
    layers: int = 6,
    width: int = 512,
    heads: int = 8,
    hidden: int = 2048,
    dropout: float = 0.1,
) -> nn.Module:
    return Encoder(vocab, context, layers, width, heads, hidden, dropout)
