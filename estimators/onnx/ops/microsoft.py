"""ONNX Runtime's own operators that its optimizer puts into exported networks, as PyTorch would train them.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md tells inputs and attributes. Those of quantised and
cached inference are left to the fallback.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.estimators.onnx.ops.registry import Call, Malformed, NeedsValue, alike, op
from memopt.estimators.onnx.ops.sequence import attend, heads_of, turned

_MICROSOFT = "com.microsoft"


def _plus(x: Tensor, *more: Tensor | None) -> Tensor:
    for each in more:
        x = x if each is None else x + each
    return x


@op("FastGelu", domain=_MICROSOFT)
def fast_gelu(call: Call) -> Tensor:
    return F.gelu(_plus(call.tensor(0), call.optional(1)), approximate="tanh")


@op("BiasGelu", domain=_MICROSOFT)
def bias_gelu(call: Call) -> Tensor:
    return F.gelu(call.tensor(0) + call.tensor(1))


@op("QuickGelu", domain=_MICROSOFT)
def quick_gelu(call: Call) -> Tensor:
    x, alpha = call.tensor(0), call.attribute("alpha", 1.702)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@op("BiasSplitGelu", domain=_MICROSOFT)
def bias_split_gelu(call: Call) -> Tensor:
    value, gate = (call.tensor(0) + call.tensor(1)).chunk(2, -1)
    return value * F.gelu(gate)


@op("BiasAdd", domain=_MICROSOFT)
def bias_add(call: Call) -> Tensor:
    return _plus(call.tensor(0), call.tensor(1), call.optional(2))


@op("FusedMatMul", domain=_MICROSOFT)
def fused_matmul(call: Call) -> Tensor:
    a, b = alike([call.tensor(0), call.tensor(1)])
    a = a.transpose(-1, -2) if call.number("transA", 0) else a
    b = b.transpose(-1, -2) if call.number("transB", 0) else b
    alpha = call.attribute("alpha", 1.0)
    out = torch.matmul(a, b)
    return out if alpha == 1.0 else out * alpha


# norms


@op("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=_MICROSOFT)
def skip_layer_norm(call: Call) -> Any:
    simple = call.node.op.startswith("SkipSimplified")
    x = _plus(call.tensor(0), call.tensor(1), call.optional(3 if simple else 4))
    eps, weight = call.attribute("epsilon", 1e-12), call.tensor(2)
    if simple:
        y = F.rms_norm(x, weight.shape, weight, eps)
    else:
        y = F.layer_norm(x, weight.shape, weight, call.optional(3), eps)
    return (y, None, None, x) if call.wants(3) else y


@op("GroupNorm", "SkipGroupNorm", domain=_MICROSOFT)
def group_norm(call: Call) -> Any:
    """Over channels that lie last unless `channels_last` is 0, then SiLU where `activation` is 1."""
    x = call.tensor(0)
    if call.node.op == "SkipGroupNorm":
        x = _plus(x, call.tensor(3), call.optional(4))
    last = bool(call.number("channels_last", 1))
    weight, bias = call.tensor(1), call.tensor(2)
    y = F.group_norm(
        x.movedim(-1, 1) if last else x,
        call.number("groups", 1),
        weight,
        bias,
        call.attribute("epsilon", 1e-5),
    )
    y = y.movedim(1, -1) if last else y
    y = F.silu(y) if call.number("activation", 0) else y
    return (y, x) if call.wants(1) else y


@op("EmbedLayerNormalization", domain=_MICROSOFT)
def embed_layer_norm(call: Call) -> Any:
    """Words, positions and segments added and normalised: (y, the lengths of the mask, the sum)."""
    words = call.tensor(0)
    places = call.optional(8)
    if places is None:
        places = torch.arange(words.shape[1])
    x = F.embedding(words, call.tensor(2)) + F.embedding(places, call.tensor(3))
    if call.has(1) and call.has(4):
        x = x + F.embedding(call.tensor(1), call.tensor(4))
    weight = call.tensor(5)
    y = F.layer_norm(x, weight.shape, weight, call.tensor(6), call.attribute("epsilon", 1e-12))
    mask = call.optional(7)
    lengths = words.new_zeros(words.shape[0]) if mask is None else mask.sum(1)
    return (y, lengths.to(torch.int32), x)[: max(1, len(call.node.outputs))]


# attention


@op("Attention", domain=_MICROSOFT)
def packed_attention(call: Call) -> Any:
    """Queries, keys and values by one product, as BERT's and GPT-2's are packed."""
    heads = call.number("num_heads", 0)
    x, weight = alike([call.tensor(0), call.tensor(1)])
    if heads < 1 or x.dim() != 3 or weight.dim() != 2:
        raise Malformed("attention needs num_heads, an input of three dimensions and a matrix")
    bias = call.optional(2)
    qkv = F.linear(x, weight.t(), bias if bias is None else bias.to(x.dtype))
    sizes = call.numbers("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3
    q, k, v = (heads_of(each, heads) for each in qkv.split(sizes, -1))
    if call.has(4):
        k, v = (
            torch.cat([past, each], 2) for past, each in zip(call.tensor(4).unbind(0), (k, v), strict=True)
        )
    mask = call.optional(5)
    mask = _padding(call.optional(3), k.shape[2]) if mask is None else mask
    causal = bool(call.number("unidirectional", 0))
    y = attend(q, k, v, mask, causal, call.attribute("scale")).transpose(1, 2).flatten(2)
    return (y, torch.stack([k, v])) if call.wants(1) else y


def _padding(mask: Tensor | None, keys: int) -> Tensor | None:
    """[batch, 1, 1 or queries, keys] of a mask over keys, of lengths, or of one already so wide."""
    if mask is None:
        return None
    if mask.dim() == 1:
        mask = torch.arange(keys) < mask.unsqueeze(1)
    mask = mask.to(torch.bool)
    return mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask


@op("MultiHeadAttention", "GroupQueryAttention", domain=_MICROSOFT)
def attention(call: Call) -> Any:
    heads = call.number("num_heads", 0)
    grouped = call.node.op == "GroupQueryAttention"
    kv_heads = call.number("kv_num_heads", heads)
    if heads < 1 or kv_heads < 1:
        raise Malformed("attention needs num_heads")
    q, k, v = _three(call, heads, kv_heads)
    if grouped and call.number("do_rotary", 0):
        cos, sin = (call.tensor(i)[: q.shape[2]] for i in (7, 8))
        between = bool(call.number("rotary_interleaved", 0))
        q, k = (
            turned(q, cos, sin, 2 * cos.shape[-1], between),
            turned(k, cos, sin, 2 * cos.shape[-1], between),
        )
    past = (3, 4) if grouped else (6, 7)
    if call.has(past[0]) and call.has(past[1]):
        k, v = torch.cat([call.tensor(past[0]), k], 2), torch.cat([call.tensor(past[1]), v], 2)
    mask = call.optional(10 if grouped else 5)
    if mask is None and not grouped:
        mask = _padding(call.optional(4), k.shape[2])
    causal = grouped or bool(call.number("unidirectional", 0))
    y = attend(q, k, v, mask, causal, call.attribute("scale"))
    return (y.transpose(1, 2).flatten(2), k, v)[: max(1, len(call.node.outputs))]


def _three(call: Call, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by head: given one by one, or packed."""
    q = call.tensor(0)
    if q.dim() == 5:
        q, k, v = q.transpose(1, 2).unbind(3)
        return q, k, v
    if q.dim() != 3:
        raise NeedsValue("queries of another form")
    if not call.has(1):
        width = q.shape[-1] // (heads + 2 * kv_heads)
        q, k, v = q.split([heads * width, kv_heads * width, kv_heads * width], -1)
    elif call.tensor(1).dim() == 5:
        k, v = call.tensor(1).transpose(1, 2).unbind(3)
    elif call.has(2):
        k, v = call.tensor(1), call.tensor(2)
    else:
        raise NeedsValue("keys without values")
    bias = call.optional(3) if call.node.op == "MultiHeadAttention" else None
    if bias is not None and k.dim() == 3:
        parts = bias.split([q.shape[-1], k.shape[-1], v.shape[-1]])
        q, k, v = (each + part for each, part in zip((q, k, v), parts, strict=True))
    k, v = (each if each.dim() == 4 else heads_of(each, kv_heads) for each in (k, v))
    return heads_of(q, heads), k, v


@op("RotaryEmbedding", domain=_MICROSOFT)
def rotary(call: Call) -> Tensor:
    """(x, positions, cosines, sines), where the standard's operator has the positions last."""
    x, places, cos, sin = (call.tensor(i) for i in range(4))
    width = call.number("rotary_embedding_dim", 0) or 2 * cos.shape[-1]
    flat = x.dim() == 3
    if flat:
        x = heads_of(x, call.number("num_heads", 0) or max(1, x.shape[-1] // width))
    at: Any = slice(x.shape[2]) if places.dim() < 2 else places.long()
    out = turned(x, cos[at], sin[at], width, bool(call.number("interleaved", 0)))
    return out.transpose(1, 2).flatten(2) if flat else out
