"""ONNX operators that make, move, cut and join tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.estimators.onnx.ops.registry import Call, Malformed, NeedsValue, op, positive


@op("Identity")
@op("CopyValue", domain="memopt")
def identity(call: Call) -> object:
    return call.inputs[0]


@op("Cast")
def cast(call: Call) -> Tensor:
    x = call.tensor(0)
    kind = call.run.dtype(call.number("to", 1))
    return x if x.dtype == kind else x.to(kind)


@op("CastLike")
def cast_like(call: Call) -> Tensor:
    return call.tensor(0).to(call.tensor(1).dtype)


@op("Shape")
def shape(call: Call) -> Tensor:
    dims = list(call.tensor(0).shape)
    start, end = call.number("start", 0), call.attribute("end")
    return call.run.real(torch.int64, dims[start : len(dims) if end is None else end])


@op("Size")
def size(call: Call) -> Tensor:
    return call.run.real(torch.int64, call.tensor(0).numel())


@op("Reshape")
def reshape(call: Call) -> Tensor:
    x = call.tensor(0)
    wanted = call.ints(1) if call.has(1) else call.numbers("shape")
    if wanted is None:
        raise Malformed("no shape is given")
    if not call.number("allowzero", 0):
        wanted = [x.shape[i] if d == 0 and i < x.dim() else d for i, d in enumerate(wanted)]
    return x.reshape(wanted)


@op("Flatten")
def flatten(call: Call) -> Tensor:
    x = call.tensor(0)
    axis = call.number("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@op("Squeeze")
def squeeze(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.axes()
    return x.squeeze() if axes is None else x.squeeze([positive(a, x.dim()) for a in axes])


@op("Unsqueeze")
def unsqueeze(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.axes()
    if axes is None:
        raise Malformed("no axes are given")
    rank = x.dim() + len(axes)
    for axis in sorted(positive(a, rank) for a in axes):
        x = x.unsqueeze(axis)
    return x


@op("Transpose")
def transpose(call: Call) -> Tensor:
    x = call.tensor(0)
    perm = call.numbers("perm")
    return x.permute(perm if perm is not None else list(reversed(range(x.dim()))))


@op("Concat")
def concat(call: Call) -> Tensor:
    return torch.cat(call.tensors(), call.number("axis", 0))


@op("Split")
def split(call: Call) -> tuple[Tensor, ...]:
    x = call.tensor(0)
    axis = positive(call.number("axis", 0), x.dim())
    sizes = call.ints(1) if call.has(1) else call.numbers("split")
    if sizes is None:
        parts = call.number("num_outputs", len(call.node.outputs))
        sizes = _even(x.shape[axis], parts)
    return torch.split(x, sizes, axis)


def _even(length: int, parts: int) -> list[int]:
    if not 1 <= parts <= 4096:
        raise Malformed(f"it splits into {parts} parts")
    chunk = -(-length // parts)
    return [max(0, min(chunk, length - i * chunk)) for i in range(parts)]


@op("SplitToSequence")
def split_to_sequence(call: Call) -> list[Tensor]:
    x = call.tensor(0)
    axis = positive(call.number("axis", 0), x.dim())
    if not call.has(1):
        parts = list(torch.split(x, 1, axis))
        return parts if call.number("keepdims", 1) else [p.squeeze(axis) for p in parts]
    sizes = call.ints(1)
    return list(torch.split(x, sizes[0] if call.value(1).dim() == 0 else sizes, axis))


@op("Slice")
def slice_(call: Call) -> Tensor:
    x = call.tensor(0)
    if call.has(1):
        starts, ends = call.ints(1), call.ints(2)
        axes = call.ints(3) if call.has(3) else list(range(len(starts)))
        steps = call.ints(4) if call.has(4) else [1] * len(starts)
    else:
        starts, ends = call.numbers("starts") or [], call.numbers("ends") or []
        axes, steps = call.numbers("axes") or list(range(len(starts))), [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _cut(x, positive(axis, x.dim()), start, end, step)
    return x


def _cut(x: Tensor, axis: int, start: int, end: int, step: int) -> Tensor:
    length = x.shape[axis]
    first, last, stride = slice(start, end, step).indices(length)
    count = len(range(first, last, stride))
    if stride == 1:
        return x if count == length else x.narrow(axis, min(first, length), count)
    if stride > 1:
        return x[(slice(None),) * axis + (slice(first, last, stride),)]
    return x.index_select(axis, torch.arange(first, last, stride, device=x.device))


@op("Expand")
def expand(call: Call) -> Tensor:
    x, wanted = call.tensor(0), call.ints(1)
    return x.broadcast_to(torch.broadcast_shapes(tuple(x.shape), tuple(wanted)))


@op("Tile")
def tile(call: Call) -> Tensor:
    return call.tensor(0).repeat(call.ints(1))


@op("Where")
def where(call: Call) -> Tensor:
    condition, a, b = call.tensor(0), call.operand(1), call.operand(2)
    if (
        isinstance(b, Tensor)
        and not isinstance(a, Tensor)
        and b.shape == torch.broadcast_shapes(b.shape, condition.shape)
    ):
        return torch.masked_fill(b, condition, a)
    return torch.where(condition, call.tensor(1), call.tensor(2))


@op("Range")
def range_(call: Call) -> Tensor:
    kind = call.tensor(0).dtype
    return torch.arange(call.scalar(0), call.scalar(1), call.scalar(2), dtype=kind)


@op("Constant")
def constant(call: Call) -> Tensor:
    weight = call.weight("value") or call.weight("sparse_value")
    if weight is not None:
        return call.run.constant(weight)
    for name, kind in (("value_int", torch.int64), ("value_ints", torch.int64),
                       ("value_float", torch.float32), ("value_floats", torch.float32)):  # fmt: skip
        value = call.attribute(name)
        if value is not None:
            return call.run.real(kind, value)
    raise Malformed("it holds no value")


@op("ConstantOfShape")
def constant_of_shape(call: Call) -> Tensor:
    weight = call.weight("value")
    fill = 0.0 if weight is None or weight.values is None else weight.values.reshape(-1)[0].item()
    kind = call.run.dtype(1 if weight is None else weight.kind)
    return torch.full(call.ints(0), fill, dtype=kind)


@op("EyeLike")
def eye_like(call: Call) -> Tensor:
    x = call.tensor(0)
    kind = call.attribute("dtype")
    return torch.eye(x.shape[0], x.shape[1], dtype=x.dtype if kind is None else call.run.dtype(kind))


@op("Trilu")
def trilu(call: Call) -> Tensor:
    k = int(call.scalar(1)) if call.has(1) else 0
    function = torch.triu if call.number("upper", 1) else torch.tril
    return function(call.tensor(0), k)


@op("Pad")
def pad(call: Call) -> Tensor:
    x = call.tensor(0)
    pads = call.ints(1) if call.has(1) else (call.numbers("pads") or call.numbers("paddings"))
    if pads is None:
        raise Malformed("no pads are given")
    axes = call.ints(3) if call.has(3) else list(range(x.dim()))
    if len(pads) != 2 * len(axes):
        raise Malformed(f"it gives {len(pads)} pads for {len(axes)} axes")
    both = [(0, 0)] * x.dim()
    for i, axis in enumerate(axes):
        both[positive(axis, x.dim())] = (pads[i], pads[i + len(axes)])
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[
        call.attribute("mode", "constant")
    ]
    if mode == "constant":
        fill = call.scalar(2) if call.has(2) and call.known[2] is not None else call.attribute("value", 0.0)
        return F.pad(x, [p for pair in reversed(both) for p in pair], value=fill)
    while both and both[0] == (0, 0) and len(both) > 1:
        both = both[1:]
    flat = [p for pair in reversed(both) for p in pair]
    if not any(flat):
        return x
    lead = x.dim() - len(both)
    if lead == 0 or len(both) > 3:
        raise NeedsValue(f"padding of mode {mode} over all of the axes")
    if lead > 2:
        padded = F.pad(x.flatten(0, lead - 2), flat, mode=mode)
        return padded.reshape(*x.shape[: lead - 1], *padded.shape[1:])
    return F.pad(x, flat, mode=mode)


@op("DepthToSpace")
def depth_to_space(call: Call) -> Tensor:
    x, block = call.tensor(0), call.number("blocksize", 1)
    if call.attribute("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    x = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, c // block**2, h * block, w * block)


@op("SpaceToDepth")
def space_to_depth(call: Call) -> Tensor:
    return F.pixel_unshuffle(call.tensor(0), call.number("blocksize", 1))


@op("ReverseSequence")
def reverse_sequence(call: Call) -> Tensor:
    return call.tensor(0).flip(call.number("time_axis", 0))


@op("CenterCropPad")
def center_crop_pad(call: Call) -> Tensor:
    x = call.tensor(0)
    wanted, axes = call.ints(1), call.numbers("axes")
    for axis, length in zip(axes if axes is not None else range(x.dim()), wanted, strict=True):
        axis = positive(axis, x.dim())
        more = length - x.shape[axis]
        if more < 0:
            x = x.narrow(axis, -more // 2, length)
        elif more > 0:
            pads = [0, 0] * (x.dim() - 1 - axis) + [more // 2, more - more // 2]
            x = F.pad(x, pads)
    return x


@op("Col2Im")
def col2im(call: Call) -> Tensor:
    x, size, block = call.tensor(0), call.ints(1), call.ints(2)
    spatial = len(size)
    if spatial != 2:
        raise NeedsValue("Col2Im beyond two dimensions")
    pads = call.numbers("pads") or [0] * 2 * spatial
    dilations, strides = call.numbers("dilations") or [1, 1], call.numbers("strides") or [1, 1]
    return torch.ops.aten.col2im(x, size, block, dilations, pads[:spatial], strides)  # type: ignore[no-any-return]
