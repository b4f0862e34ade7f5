"""ONNX operators over time: LSTM, GRU, RNN, attention, rotary embeddings and Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.estimators.onnx.ops.registry import Call, Malformed, NeedsValue, alike, op

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@op("LSTM", "GRU", "RNN")
def recurrent(call: Call) -> Any:
    """One layer through torch's own recurrent kernel, so that it saves what a script's `nn.LSTM` saves."""
    return _layers(call, call.node.op, [(1, 2, 3, 5, 6)], 0.0)


@op("Stack", domain="memopt")
def matched_stack(call: Call) -> Any:
    """What `match.recurrent` found: layers on top of each other, with dropout between."""
    slots = [tuple(range(first, first + 5)) for first in range(1, len(call.node.inputs), 5)]
    return _layers(call, str(call.attribute("kind")), slots, call.attribute("ratio", 0.0))


def _layers(call: Call, kind: str, slots: list[tuple[int, ...]], ratio: float) -> Any:
    """`slots`: the inputs that are a layer's weights, recurrent weights, biases and first states, the lowest layer first."""
    given = [call.tensor(i) for each in slots for i in each[:2]]
    x, *matrices = _recurrent_types([call.tensor(0), *given])
    direction = call.attribute("direction", "forward")
    batch_first = bool(call.number("layout", 0))
    x = x.transpose(0, 1) if batch_first else x
    length, batch = x.shape[0], x.shape[1]
    directions, hidden = matrices[0].shape[0], matrices[1].shape[-1]
    wrong = directions != (2 if direction == "bidirectional" else 1)
    if wrong or any(w.shape[1] != _GATES[kind] * hidden for w in matrices):
        raise Malformed("the shapes of its weights do not fit its direction and hidden size")
    x = x.flip(0) if direction == "reverse" else x
    parameters: list[Tensor] = []
    for (_, _, at, *_), w, r in zip(slots, matrices[::2], matrices[1::2], strict=True):
        bias = call.optional(at)
        for d in range(directions):
            parameters += [_direction(w, d), _direction(r, d)]
            if bias is not None:
                parameters += _direction(bias, d).to(x.dtype).chunk(2)
    states = [
        _state(call, [each[at] for each in slots], x, directions, hidden, batch_first)
        for at in ((3, 4) if kind == "LSTM" else (3,))
    ]
    how = (call.has(slots[0][2]), len(slots), ratio, True, directions == 2, False)
    y, last = _kernel(call, kind)(x, states, parameters, how)
    y = y.flip(0) if direction == "reverse" else y
    y = y.view(length, batch, directions, hidden)
    last = [state[-directions:] for state in last] if len(slots) > 1 else last
    if batch_first:
        return y.transpose(0, 1), *(s.transpose(0, 1) for s in last)
    return y.permute(0, 2, 1, 3), *last


def _recurrent_types(tensors: list[Tensor]) -> list[Tensor]:
    """One element type; under autocast the lower one, as cuDNN's recurrent kernels take it (weights are copied)."""
    if not torch.is_autocast_enabled("cpu"):
        return alike(tensors)
    kind = torch.get_autocast_dtype("cpu")
    return [t.to(kind) for t in tensors]


def _direction(weight: Tensor, index: int) -> Tensor:
    return weight.squeeze(0) if weight.shape[0] == 1 else weight[index]


def _state(call: Call, slots: list[int], x: Tensor, directions: int, hidden: int, first: bool) -> Tensor:
    """The first states of all layers; `first`: the batch is their first dimension."""
    given = [call.optional(slot) for slot in slots]
    if None in given:
        return torch.zeros(len(slots) * directions, x.shape[1], hidden, dtype=x.dtype)
    states = [state.to(x.dtype) for state in given if state is not None]
    states = [state.transpose(0, 1) if first else state for state in states]
    return states[0].contiguous() if len(states) == 1 else torch.cat(states)


def _kernel(call: Call, kind: str) -> Any:
    def lstm(x: Tensor, states: list[Tensor], weights: list[Tensor], how: Any) -> Any:
        y, *last = torch.lstm(x, states, weights, *how)
        return y, last

    def gru(x: Tensor, states: list[Tensor], weights: list[Tensor], how: Any) -> Any:
        y, last = torch.gru(x, states[0], weights, *how)
        return y, [last]

    def rnn(x: Tensor, states: list[Tensor], weights: list[Tensor], how: Any) -> Any:
        activation = str((call.attribute("activations") or ("Tanh",))[0]).lower()
        function = torch.rnn_relu if activation == "relu" else torch.rnn_tanh
        y, last = function(x, states[0], weights, *how)
        return y, [last]

    return {"LSTM": lstm, "GRU": gru, "RNN": rnn}[kind]


@op("Attention")
def attention(call: Call) -> Any:
    """Opset 23's attention, by PyTorch's `scaled_dot_product_attention` (whose GPU kernel keeps no T x T matrix)."""
    q, k, v = alike([call.tensor(0), call.tensor(1), call.tensor(2)])
    flat = q.dim() == 3
    if flat:
        heads, kv_heads = call.number("q_num_heads", 0), call.number("kv_num_heads", 0)
        if heads < 1 or kv_heads < 1:
            raise Malformed("attention over 3-D inputs needs q_num_heads and kv_num_heads")
        q, k, v = heads_of(q, heads), heads_of(k, kv_heads), heads_of(v, kv_heads)
    if call.has(4) and call.has(5):
        k, v = torch.cat([call.tensor(4), k], 2), torch.cat([call.tensor(5), v], 2)
    scale, causal = call.attribute("scale"), bool(call.number("is_causal", 0))
    mask = _whole_mask(call.optional(3), k.shape[2])
    shown = None
    if call.wants(3) or call.attribute("softcap", 0.0):
        y, shown = _by_hand(
            q,
            k,
            v,
            mask,
            causal,
            scale,
            call.attribute("softcap", 0.0),
            call.number("qk_matmul_output_mode", 0),
        )
    else:
        y = attend(q, k, v, mask, causal, scale)
    y = y.transpose(1, 2).flatten(2) if flat else y
    return (y, k, v, shown)[: max(1, len(call.node.outputs))]


def _whole_mask(mask: Tensor | None, keys: int) -> Tensor | None:
    """The mask for all keys: a shorter one hides the rest."""
    if mask is None:
        return None
    mask = mask.unsqueeze(0) if mask.dim() == 1 else mask
    short = keys - mask.shape[-1]
    if short <= 0 or mask.shape[-1] == 1:
        return mask
    return F.pad(mask, (0, short), value=False if mask.dtype == torch.bool else float("-inf"))


def _by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    cap: float,
    shown: int,
) -> tuple[Tensor, Tensor]:
    """Attention whose matrix is capped or shown: no fused kernel does that, so the matrix exists."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    raw = torch.matmul(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(raw / cap) if cap else raw
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if causal:
        triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~triangle, float("-inf"))
    weights = F.softmax(scores, -1)
    return torch.matmul(weights, v), {0: raw, 1: scores, 2: scores}.get(shown, weights)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * size] as [batch, heads, length, size]."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    ratio: float = 0.0,
) -> Tensor:
    """Scaled dot-product attention; grouped heads where there are fewer keys than queries."""
    if mask is not None:
        mask = mask if mask.dtype in (torch.bool, q.dtype) else mask.to(q.dtype)
        causal = False
    grouped = q.dim() == 4 and k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, ratio, causal, scale=scale, enable_gqa=grouped)


@op("Attention", domain="memopt")
def matched_attention(call: Call) -> Tensor:
    """What `match.attention` found: queries, keys (still transposed where `turned`), values, mask."""
    q, k, v = alike([call.tensor(0), call.tensor(1), call.tensor(2)])
    k = k.transpose(-1, -2) if call.number("turned", 0) else k
    causal = bool(call.number("causal", 0))
    return attend(q, k, v, call.optional(3), causal, call.attribute("scale"), call.attribute("ratio", 0.0))


@op("RotaryEmbedding")
def rotary(call: Call) -> Tensor:
    x, cos, sin = call.tensor(0), call.tensor(1), call.tensor(2)
    flat = x.dim() == 3
    if flat:
        x = heads_of(x, call.number("num_heads", 1))
    if call.has(3):
        cos, sin = cos[call.tensor(3).long()], sin[call.tensor(3).long()]
    width = call.number("rotary_embedding_dim", 0) or x.shape[-1]
    out = turned(x, cos, sin, width, bool(call.number("interleaved", 0)))
    return out.transpose(1, 2).flatten(2) if flat else out


def turned(x: Tensor, cos: Tensor, sin: Tensor, width: int, interleaved: bool) -> Tensor:
    """`x` [batch, heads, length, size] with the first `width` of each head turned by angles [(batch,) length, width / 2]."""
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    part, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return out if width == x.shape[-1] else torch.cat([out, rest], -1)


@op("DFT")
def dft(call: Call) -> Tensor:
    """Over `axis`, an attribute before opset 20; the last dimension holds real and imaginary parts."""
    x = call.tensor(0)
    if x.shape[-1] not in (1, 2):
        raise Malformed("its input is neither real nor complex")
    values = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)
    axis = int(call.scalar(2)) if call.has(2) else call.number("axis", 1 if call.opset < 20 else -2)
    axis = axis if axis >= 0 else axis + 1  # as if the parts were no dimension
    length = int(call.scalar(1)) if call.has(1) else None
    backward, half = bool(call.number("inverse", 0)), bool(call.number("onesided", 0))
    if half and not backward and not values.is_complex():
        made = torch.fft.rfft(values, length, axis)
    elif half and backward:
        real: Tensor = torch.fft.irfft(values, length, axis).unsqueeze(-1)
        return real
    else:
        made = (torch.fft.ifft if backward else torch.fft.fft)(values, length, axis)
    return torch.view_as_real(made)


@op("STFT")
def stft(call: Call) -> Tensor:
    """[batch, frames, frequencies, 2] of a real signal, as torch.stft makes it without centring."""
    x, window = call.tensor(0), call.optional(2)
    if x.dim() == 3:
        if x.shape[-1] != 1:
            raise NeedsValue("a complex signal")
        x = x.squeeze(-1)
    if window is None:
        window = torch.ones(int(call.scalar(3)), dtype=x.dtype)
    length = int(call.scalar(3)) if call.has(3) else window.shape[0]
    half = bool(call.number("onesided", 1))
    made = torch.stft(
        x, length, int(call.scalar(1)), len(window), window, center=False, onesided=half, return_complex=True
    )
    return torch.view_as_real(made).transpose(1, 2)
