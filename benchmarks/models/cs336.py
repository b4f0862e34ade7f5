"""The language model of Stanford's CS336 assignments in plain torch: own linear, RMSNorm, RoPE, softmax, loss and AdamW.

Written anew from the public description; the order of operations follows the memory events that its training leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        std = math.sqrt(2 / (d_in + d_out))
        self.weight = nn.Parameter(
            nn.init.trunc_normal_(torch.empty(d_out, d_in), std=std, a=-3 * std, b=3 * std)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(vocab, d_model), a=-3, b=3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class RMSNorm(nn.Module):
    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * rms
        return (self.weight * x).to(kind)


class Rope(nn.Module):
    def __init__(self, length: int, dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        freqs = theta ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.arange(length)[:, None] * freqs[None, :]
        self.register_buffer("cache", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cache[:, : x.shape[-2]]  # type: ignore[index]
        first = cos * x1 - sin * x2
        second = sin * x1 + cos * x2
        return torch.stack((first, second), dim=-1).flatten(-2)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    rescaled = x - torch.max(x, dim=dim, keepdim=True)[0]
    exps = torch.exp(rescaled)
    return exps / torch.sum(exps, dim=dim, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, d_model: int, heads: int, rope: Rope) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out = (Linear(d_model, d_model) for _ in range(4))
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        query = self.rope(query)
        key = self.rope(key)
        seq = torch.arange(length, device=x.device)
        mask = (seq[:, None] >= seq[None, :])[None, None]
        mixed = attention(query, key, value, mask)
        mixed = mixed.transpose(1, 2).flatten(-2).contiguous()
        return self.out(mixed)


class SwiGLU(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(d_model, d_ff), Linear(d_ff, d_model), Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, rope: Rope) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(d_model, heads, rope), SwiGLU(d_model, d_ff)
        self.ln1, self.ln2 = RMSNorm(d_model), RMSNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x_attn = self.attn(self.ln1(x))
        attended = x + x_attn
        x_ffn = self.ffn(self.ln2(attended))
        return attended + x_ffn


class Transformer(nn.Module):
    def __init__(self, vocab: int, length: int, d_model: int, layers: int, heads: int, d_ff: int) -> None:
        super().__init__()
        rope = Rope(length, d_model // heads)
        self.embeddings = Embedding(vocab, d_model)
        self.layers = nn.ModuleList(Block(d_model, heads, d_ff, rope) for _ in range(layers))
        self.norm, self.head = RMSNorm(d_model), Linear(d_model, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def log_softmax(x: Tensor) -> Tensor:
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": weight_decay, "eps": 1e-8})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.data
                p.data -= lr * group["weight_decay"] * p.data
                t = state.get("t", 1)
                m = state.get("m", torch.zeros_like(grad))
                v = state.get("v", torch.zeros_like(grad))
                m_t = beta1 * m + (1 - beta1) * grad
                v_t = beta2 * v + (1 - beta2) * torch.square(grad)
                lr_t = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                p.data -= lr_t * m_t / (torch.sqrt(v_t) + eps)
                state["t"], state["m"], state["v"] = t + 1, m_t, v_t
