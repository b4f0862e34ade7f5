"""Train a Llama-shaped decoder in bf16 with AdamW: `python benchmarks/decoder.py --size 7b`. For estimating, not for running here."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "tiny": (1000, 64, 2, 4, 4, 176),
    "7b": (32000, 4096, 32, 32, 32, 11008),
    "70b": (32000, 8192, 80, 64, 8, 28672),
}
"""Vocabulary, width, layers, heads, key and value heads, feed-forward width."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = heads, kv, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv * self.dim, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q = self.rotate(self.q(h).view(batch, length, self.heads, self.dim).transpose(1, 2), cos, sin)
        k = self.rotate(self.k(h).view(batch, length, self.kv, self.dim).transpose(1, 2), cos, sin)
        v = self.v(h).view(batch, length, self.kv, self.dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv != self.heads)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, heads: int, kv: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        self.dim = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1], device=x.device).float(), 10000.0 ** -(torch.arange(0, self.dim, 2, device=x.device).float() / self.dim))  # fmt: skip
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    model = Decoder(*SIZES[args.size]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(args.steps):
        tokens = torch.randint(0, SIZES[args.size][0], (args.batch, args.length), device=args.device)
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), tokens.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()
