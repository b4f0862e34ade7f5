"""ONNX operators of neural networks: convolution, pooling, normalisation, dropout, resizing, losses."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.estimators.onnx.ops.registry import Call, Malformed, NeedsValue, alike, op, positive

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def sliding_window(call: Call, x: Tensor, kernel: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads (begins, then ends) of a sliding window, `auto_pad` worked out."""
    rank = len(kernel)
    strides = call.numbers("strides") or [1] * rank
    dilations = call.numbers("dilations") or [1] * rank
    pads = call.numbers("pads") or [0] * 2 * rank
    mode = call.attribute("auto_pad", "NOTSET")
    if not len(strides) == len(dilations) == rank or len(pads) != 2 * rank or min(strides + dilations) < 1:
        raise Malformed("its strides, dilations and pads do not fit its kernel")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        spans = zip(x.shape[2:], kernel, strides, dilations, strict=True)
        totals = [max(0, (math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n) for n, k, s, d in spans]
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = less + more if mode == "SAME_UPPER" else more + less
    return strides, dilations, pads


def _even_pads(x: Tensor, pads: list[int], fill: float) -> tuple[Tensor, list[int]]:
    """`x` and symmetric pads: what is uneven (or negative) is padded on first, as a script would."""
    rank = len(pads) // 2
    begins, ends = pads[:rank], pads[rank:]
    if begins == ends and min(begins, default=0) >= 0:
        return x, begins
    flat = [p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair]
    return F.pad(x, flat, value=fill), [0] * rank


def _spatial(x: Tensor) -> int:
    if not 1 <= x.dim() - 2 <= 3:
        raise Malformed(f"its input has {x.dim()} dimensions")
    return x.dim() - 2


@op("Conv")
@op("FusedConv", domain="com.microsoft")
def conv(call: Call) -> Tensor:
    x, weight = alike([call.tensor(0), call.tensor(1)])
    strides, dilations, pads = sliding_window(call, x, list(weight.shape[2:]))
    x, padding = _even_pads(x, pads, 0.0)
    bias = call.optional(2)
    bias = bias if bias is None else bias.to(x.dtype)
    return _CONV[_spatial(x)](x, weight, bias, strides, padding, dilations, call.number("group", 1))


@op("ConvTranspose")
def conv_transpose(call: Call) -> Tensor:
    x, weight = alike([call.tensor(0), call.tensor(1)])
    kernel, rank = list(weight.shape[2:]), _spatial(x)
    strides = call.numbers("strides") or [1] * rank
    dilations = call.numbers("dilations") or [1] * rank
    extra = call.numbers("output_padding") or [0] * rank
    pads = call.numbers("pads") or [0] * 2 * rank
    wanted = call.numbers("output_shape")
    if call.attribute("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER") and wanted is None:
        wanted = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if wanted is not None:
        full = [s * (n - 1) + o + (k - 1) * d + 1 for n, s, o, k, d in
                zip(x.shape[2:], strides, extra, kernel, dilations, strict=True)]  # fmt: skip
        over = [f - w for f, w in zip(full, wanted[-rank:], strict=True)]
        pads = [o // 2 for o in over] + [o - o // 2 for o in over]
    even = [min(a, b) for a, b in zip(pads[:rank], pads[rank:], strict=True)]
    bias = call.optional(2)
    bias = bias if bias is None else bias.to(x.dtype)
    even = [max(0, p) for p in even]
    y = _CONV_TRANSPOSE[rank](x, weight, bias, strides, even, extra, call.number("group", 1), dilations)
    cut = [-(p - e) for pair in zip(pads[:rank], pads[rank:], even, strict=True) for p, e in
           ((pair[0], pair[2]), (pair[1], pair[2]))]  # fmt: skip
    return F.pad(y, [c for i in reversed(range(rank)) for c in cut[2 * i : 2 * i + 2]]) if any(cut) else y


@op("MaxPool")
def max_pool(call: Call) -> Any:
    x = call.tensor(0)
    kernel = call.numbers("kernel_shape") or []
    strides, dilations, pads = sliding_window(call, x, kernel)
    x, padding = _even_pads(x, pads, float("-inf"))
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        x = F.pad(x, [p for v in reversed(padding) for p in (v, v)], value=float("-inf"))
        padding = [0] * len(kernel)
    ceil = bool(call.number("ceil_mode", 0))
    return _MAX_POOL[_spatial(x)](x, kernel, strides, padding, dilations, ceil, call.wants(1))


@op("AveragePool", "LpPool")
def average_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    kernel = call.numbers("kernel_shape") or []
    strides, dilations, pads = sliding_window(call, x, kernel)
    if max(dilations) > 1:
        raise NeedsValue("dilated average pooling")
    x, padding = _even_pads(x, pads, 0.0)
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        x, padding = F.pad(x, [p for v in reversed(padding) for p in (v, v)]), [0] * len(kernel)
    ceil, count = bool(call.number("ceil_mode", 0)), bool(call.number("count_include_pad", 0))
    if call.node.op == "AveragePool":
        return _AVG_POOL[_spatial(x)](x, kernel, strides, padding, ceil, count)
    p = call.number("p", 2)
    pooled = _AVG_POOL[_spatial(x)](x.abs().pow(p), kernel, strides, padding, ceil)
    return (pooled * math.prod(kernel)).pow(1 / p)


@op("GlobalAveragePool")
def global_average_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.mean(list(range(2, x.dim())), keepdim=True)


@op("GlobalMaxPool")
def global_max_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.amax(list(range(2, x.dim())), keepdim=True)


@op("GlobalLpPool")
def global_lp_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    out: Tensor = torch.linalg.vector_norm(x, call.number("p", 2), list(range(2, x.dim())), keepdim=True)
    return out


@op("MaxUnpool")
def max_unpool(call: Call) -> Tensor:
    x = call.tensor(0)
    kernel = call.numbers("kernel_shape") or []
    unpool: dict[int, Any] = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}
    size = call.ints(2)[2:] if call.has(2) else None
    return unpool[_spatial(x)](  # type: ignore[no-any-return]
        x, call.tensor(1).long(), kernel, call.numbers("strides") or 1, 0, size
    )


@op("BatchNormalization")
def batch_norm(call: Call) -> Any:
    """Trained, whatever the file says: an exported model is frozen only because exporters freeze it."""
    x = call.tensor(0)
    mean, var = call.tensor(3).detach(), call.tensor(4).detach()
    momentum = 1.0 - call.attribute("momentum", 0.9)
    y = F.batch_norm(
        x, mean, var, call.tensor(1), call.tensor(2), True, momentum, call.attribute("epsilon", 1e-5)
    )
    return (y, *[mean, var] * 2)[: max(1, len(call.node.outputs))]


@op("InstanceNormalization")
def instance_norm(call: Call) -> Tensor:
    eps = call.attribute("epsilon", 1e-5)
    return F.instance_norm(call.tensor(0), weight=call.tensor(1), bias=call.tensor(2), eps=eps)


@op("LayerNormalization")
@op("LayerNormalization", domain="com.microsoft")
def layer_norm(call: Call) -> Any:
    x, weight, bias = call.tensor(0), call.tensor(1), call.optional(2)
    axis = positive(call.number("axis", -1), x.dim())
    shape, eps = x.shape[axis:], call.attribute("epsilon", 1e-5)
    flat = weight.numel() == math.prod(shape) and (bias is None or bias.numel() == weight.numel())
    if not flat:
        y = F.layer_norm(x, shape, eps=eps) * weight
        return y if bias is None else y + bias
    y = F.layer_norm(x, shape, weight.reshape(shape), bias if bias is None else bias.reshape(shape), eps)
    if not call.wants(1) and not call.wants(2):
        return y
    dims = list(range(axis, x.dim()))
    return y, x.mean(dims, keepdim=True), (x.var(dims, keepdim=True, unbiased=False) + eps).rsqrt()


@op("RMSNormalization")
@op("SimplifiedLayerNormalization")
@op("SimplifiedLayerNormalization", domain="com.microsoft")
def rms_norm(call: Call) -> Tensor:
    x, weight = call.tensor(0), call.tensor(1)
    axis = positive(call.number("axis", -1), x.dim())
    shape, eps = x.shape[axis:], call.attribute("epsilon", 1e-5)
    if weight.numel() == math.prod(shape):
        return F.rms_norm(x, shape, weight.reshape(shape), eps)
    return F.rms_norm(x, shape, None, eps) * weight


@op("GroupNormalization")
def group_norm(call: Call) -> Tensor:
    x, weight, bias = call.tensor(0), call.tensor(1), call.tensor(2)
    groups, eps = call.number("num_groups", 1), call.attribute("epsilon", 1e-5)
    weight, bias = (
        weight.flatten(),
        bias.flatten(),
    )  # as [C, 1, 1] where it was matched from a scale and a shift
    if weight.numel() == groups != x.shape[1]:
        each = x.shape[1] // groups
        weight, bias = weight.repeat_interleave(each), bias.repeat_interleave(each)
    return F.group_norm(x, groups, weight, bias, eps)


@op("MeanVarianceNormalization")
def mean_variance_norm(call: Call) -> Tensor:
    x = call.tensor(0)
    axes = call.numbers("axes") or [0, 2, 3]
    return (x - x.mean(axes, keepdim=True)) / (x.std(axes, keepdim=True, unbiased=False) + 1e-9)


@op("LRN")
def local_response_norm(call: Call) -> Tensor:
    size = call.number("size", 1)
    alpha, beta, k = (call.attribute(n, d) for n, d in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    return F.local_response_norm(call.tensor(0), size, alpha, beta, k)


@op("LpNormalization")
def lp_norm(call: Call) -> Tensor:
    return F.normalize(call.tensor(0), call.number("p", 2), call.number("axis", -1))


@op("HannWindow", "HammingWindow", "BlackmanWindow")
def window(call: Call) -> Tensor:
    function = {"HannWindow": torch.hann_window, "HammingWindow": torch.hamming_window}.get(
        call.node.op, torch.blackman_window
    )
    kind = call.run.dtype(call.number("output_datatype", 1))
    return function(int(call.scalar(0)), periodic=bool(call.number("periodic", 1))).to(kind)


@op("Dropout")
def dropout(call: Call) -> Any:
    """Trained, whatever the file says; a ratio of 0 does nothing."""
    x = call.tensor(0)
    ratio = call.attribute("ratio", 0.5)
    if call.has(1) and call.known[1] is not None:
        ratio = call.scalar(1)
    y = x if ratio == 0 else F.dropout(x, float(ratio), training=True)
    return (y, torch.empty(x.shape, dtype=torch.bool)) if call.wants(1) else y


@op("Resize", "Upsample")
def resize(call: Call) -> Tensor:
    x = call.tensor(0)
    at = 2 if call.node.op == "Resize" and call.opset >= 11 else 1
    mode = {"nearest": "nearest", "linear": "linear", "cubic": "bicubic"}.get(
        call.attribute("mode", "nearest")
    )
    axes = call.numbers("axes") or list(range(x.dim()))
    size = list(x.shape)
    if call.has(3):
        wanted: list[float] = [float(v) for v in call.ints(3)]
    else:
        scales = call.floats(at) if call.has(at) else list(call.attribute("scales", ()))
        wanted = [math.floor(x.shape[a] * s) for a, s in zip(axes, scales, strict=True)]
    wanted = _same_ratio(
        call.attribute("keep_aspect_ratio_policy", "stretch"), wanted, [x.shape[a] for a in axes]
    )
    for axis, length in zip(axes, wanted, strict=True):
        size[positive(axis, x.dim())] = int(length)
    if size == list(x.shape):
        return x
    if size[:2] != list(x.shape[:2]) or mode is None or x.dim() < 3:
        raise NeedsValue("resizing of batch or channels")
    mode = {"linear": {3: "linear", 4: "bilinear", 5: "trilinear"}[x.dim()]}.get(mode, mode)
    if mode == "bicubic" and x.dim() != 4:
        raise NeedsValue("cubic resizing of something else than images")
    return F.interpolate(x, size[2:], mode=mode)


def _same_ratio(policy: str, wanted: list[float], lengths: list[int]) -> list[float]:
    if policy not in ("not_larger", "not_smaller") or not lengths:
        return wanted
    ratios = [w / n for w, n in zip(wanted, lengths, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(n * ratio + 0.5) for n in lengths]


@op("GridSample")
def grid_sample(call: Call) -> Tensor:
    modes = {"linear": "bilinear", "cubic": "bicubic"}
    mode = call.attribute("mode", "bilinear")
    align = bool(call.number("align_corners", 0))
    x, grid = alike([call.tensor(0), call.tensor(1)])
    return F.grid_sample(x, grid, modes.get(mode, mode), call.attribute("padding_mode", "zeros"), align)


@op("AffineGrid")
def affine_grid(call: Call) -> Tensor:
    return F.affine_grid(call.tensor(0), call.ints(1), bool(call.number("align_corners", 0)))


@op("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(call: Call) -> Any:
    scores, labels, weight = call.tensor(0), call.tensor(1).long(), call.optional(2)
    ignore = call.attribute("ignore_index", -100)
    log_probabilities = F.log_softmax(scores, dim=1)
    reduction = call.attribute("reduction", "mean")
    loss = F.nll_loss(log_probabilities, labels, weight, ignore_index=ignore, reduction=reduction)
    return (loss, log_probabilities) if call.wants(1) else loss


@op("NegativeLogLikelihoodLoss")
def nll_loss(call: Call) -> Tensor:
    ignore = call.attribute("ignore_index", -100)
    reduction = call.attribute("reduction", "mean")
    labels, weight = call.tensor(1).long(), call.optional(2)
    return F.nll_loss(call.tensor(0), labels, weight, ignore_index=ignore, reduction=reduction)
