"""The models that lit-gpt fine-tuned in October 2023 with LoRA, LLaMA-Adapter and its second version, in plain torch.

Only what is trained makes autograd save a layer's input; so what is frozen matters more here than the shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nf4 import Linear4bit

PROMPT, FIRST_ADAPTED = 10, 2
RANK, ALPHA, DROPOUT = 8, 16, 0.05


class Shape(NamedTuple):
    """`gated`: Llama's feed-forward and RMS norm, no biases. `side_by_side`: attention and feed-forward from one norm's output.
    `quantised`: "", "nf4" or "nf4-dq"."""

    vocab: int
    width: int
    layers: int
    heads: int
    groups: int
    inner: int
    gated: bool
    side_by_side: bool
    biased: bool
    rotary: float = 1.0
    quantised: str = ""

    def linear(self, width: int, out: int) -> nn.Module:
        if self.quantised:
            return Linear4bit(width, out, self.biased, self.quantised)
        return nn.Linear(width, out, bias=self.biased)


SHAPES = {
    "phi-1.5 1.3 B": Shape(51200, 2048, 24, 32, 32, 8192, False, True, True, 0.5),
    "Llama 2 7 B": Shape(32000, 4096, 32, 32, 32, 11008, True, False, False),
    "Llama 2 13 B": Shape(32000, 5120, 40, 40, 40, 13824, True, False, False),
    "Falcon 7 B": Shape(65024, 4544, 32, 71, 1, 18176, False, True, False),
    "CodeLlama 7 B": Shape(32016, 4096, 32, 32, 32, 11008, True, False, False),
    "CodeLlama 13 B": Shape(32016, 5120, 40, 40, 40, 13824, True, False, False),
    "CodeLlama 34 B": Shape(32000, 8192, 48, 64, 8, 22016, True, False, False),
}
"""By the model and size of `litgpt_lora.csv`."""


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.float()
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return (self.weight * normed).to(dtype=kind)


class Linear(nn.Module):
    """`scaled` (the second adapter): a trained bias and scale of every output."""

    def __init__(self, shape: Shape, width: int, out: int, scaled: bool) -> None:
        super().__init__()
        self.linear, self.scaled = shape.linear(width, out), scaled
        if scaled:
            self.adapter_bias = nn.Parameter(torch.zeros(out))
            self.adapter_scale = nn.Parameter(torch.ones(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return self.adapter_scale * (out + self.adapter_bias) if self.scaled else out


class LoRA(nn.Module):
    """Queries, keys and values in one product; low-rank updates of queries and values, padded with zeros for the keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        head = shape.width // shape.heads
        keys = head * shape.groups
        self.even = shape.heads == shape.groups
        self.parts = (shape.width, keys)
        self.out = shape.width + 2 * keys
        self.linear = shape.linear(shape.width, self.out)
        self.lora_a = nn.Parameter(torch.zeros(2 * RANK, shape.width))
        self.lora_b = nn.Parameter(torch.zeros(sum(self.parts), RANK))
        self.places = [*range(shape.width), *range(shape.width + keys, self.out)]

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.linear(x)
        low = F.linear(F.dropout(x, DROPOUT, self.training), self.lora_a).transpose(-2, -1)
        weight = self.lora_b.unsqueeze(-1)
        if self.even:
            high = F.conv1d(low, weight, groups=2)
        else:
            pairs = zip(low.chunk(2, dim=1), weight.split(self.parts), strict=True)
            high = torch.cat([F.conv1d(a, b) for a, b in pairs], dim=1)
        return frozen + self.padded(high.transpose(-2, -1)) * (ALPHA / RANK)

    def padded(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        zeros = x.new_zeros((*x.shape[:-1], self.out)).view(-1, self.out)
        places = torch.tensor(self.places, device=x.device)
        filled = zeros.index_copy(1, places, x.reshape(-1, sum(self.parts)))
        return filled.view((*x.shape[:-1], self.out)).transpose(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return ((x * cos) + (torch.cat((-second, first), dim=-1) * sin)).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape, method: str, index: int) -> None:
        super().__init__()
        self.shape, self.head = shape, shape.width // shape.heads
        scaled = method == "adapter_v2"
        out = (shape.heads + 2 * shape.groups) * self.head
        self.qkv = LoRA(shape) if method == "lora" else Linear(shape, shape.width, out, scaled)
        self.proj = Linear(shape, shape.width, shape.width, scaled)
        self.adapted = method.startswith("adapter") and index >= FIRST_ADAPTED
        if self.adapted:
            self.adapter_wte = nn.Embedding(PROMPT, shape.width)
            self.adapter_gate = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length = x.shape[:2]
        each = self.shape.heads // self.shape.groups
        qkv = self.qkv(x).view(batch, length, self.shape.groups, each + 2, self.head).permute(0, 2, 3, 1, 4)
        query, key, value = qkv.split((each, 1, 1), dim=2)
        if each > 1:
            key, value = (part.expand(-1, -1, each, -1, -1) for part in (key, value))
        return tuple(part.reshape(batch, -1, length, self.head) for part in (query, key, value))  # type: ignore[return-value]

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None, mask: Tensor | None
    ) -> Tensor:
        query, key, value = self.split(x)
        dims = cos.shape[-1]
        query = torch.cat((rotate(query[..., :dims], cos, sin), query[..., dims:]), dim=-1)
        key = torch.cat((rotate(key[..., :dims], cos, sin), key[..., dims:]), dim=-1)
        if past is not None:
            at = torch.arange(x.shape[1], device=x.device)
            key, value = past[0].index_copy_(2, at, key), past[1].index_copy_(2, at, value)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        mixed = mixed.transpose(1, 2)
        if self.adapted:
            _, key, value = self.split(self.adapter_wte.weight[None])
            every = torch.ones(x.shape[1], PROMPT, dtype=torch.bool, device=x.device)
            key, value = (part.expand(x.shape[0], -1, -1, -1) for part in (key, value))
            prompted = F.scaled_dot_product_attention(query, key, value, attn_mask=every)
            mixed = mixed + self.adapter_gate * prompted.transpose(1, 2)
        return self.proj(mixed.reshape(x.shape))


class Block(nn.Module):
    def __init__(self, shape: Shape, method: str, index: int) -> None:
        super().__init__()
        norm = RMSNorm if shape.gated else nn.LayerNorm
        scaled = method == "adapter_v2"
        self.norm1 = norm(shape.width)
        self.norm2 = None if shape.side_by_side else norm(shape.width)
        self.attention = Attention(shape, method, index)
        self.up = Linear(shape, shape.width, shape.inner, scaled)
        self.gate = Linear(shape, shape.width, shape.inner, scaled) if shape.gated else None
        self.down = Linear(shape, shape.inner, shape.width, scaled)
        self.tanh = "tanh" if shape.biased else "none"

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate=self.tanh))
        gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None, mask: Tensor | None
    ) -> Tensor:
        normed = self.norm1(x)
        mixed = self.attention(normed, cos, sin, past, mask)
        if self.norm2 is None:
            return self.feed_forward(normed) + mixed + x
        x = mixed + x
        return self.feed_forward(self.norm2(x)) + x


class LitGPT(nn.Module):
    """`method`: lora, adapter, adapter_v2 or generate. Logits come in pieces of 128 positions, in fp32 as Fabric returns them."""

    def __init__(self, shape: Shape, method: str, length: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape, method, index) for index in range(shape.layers))
        self.norm = (RMSNorm if shape.gated else nn.LayerNorm)(shape.width)
        self.head = Linear(shape, shape.width, shape.vocab, method == "adapter_v2")
        dims = int(shape.rotary * shape.width // shape.heads)
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, dims, 2).float() / dims)).repeat(1, 2)  # fmt: skip
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = trained(name, method)

    def forward(
        self, ids: Tensor, past: list[list[Tensor]] | None = None, mask: Tensor | None = None
    ) -> list[Tensor]:
        x = self.embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, past[index] if past else None, mask)
        return [self.head(piece) for piece in self.norm(x).split(128, dim=1)]


def trained(name: str, method: str) -> bool:
    """Whether the parameter `name` is trained by `method`."""
    if method == "adapter_v2":
        return "adapter_" in name or "norm" in name
    return method.replace("lora", "lora_").replace("adapter", "adapter_") in name
