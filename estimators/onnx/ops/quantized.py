"""ONNX operators on quantised numbers. Integers carry no gradient: nothing before one of them is trained through it.

What is quantised and dequantised at once is a fake quantisation, which training does have (`onnx/read/fake_quantize.py`).
Integer products hold their 32-bit sums beside what they return, as `torch._int_mm` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.estimators.onnx.ops.nn import sliding_window
from memopt.estimators.onnx.ops.registry import Call, Malformed, op, positive


@op("QuantizeLinear")
def quantize(call: Call) -> Tensor:
    kind = call.tensor(2).dtype if call.has(2) else torch.uint8
    return call.tensor(0).to(kind)


@op("DequantizeLinear")
def dequantize(call: Call) -> Tensor:
    return call.tensor(0).to(call.tensor(1).dtype)


@op("FakeQuantize", domain="memopt")
def fake_quantize(call: Call) -> Tensor:
    """QuantizeLinear and DequantizeLinear put together again: keeps where nothing was clipped, a byte an element."""
    x, scale = call.tensor(0), call.tensor(1)
    if call.known[0] is not None:
        return x
    if scale.numel() == 1 or scale.dim() != 1:
        return torch.fake_quantize_per_tensor_affine(x, 1.0, 0, 0, 255)
    axis = positive(call.number("axis", 1), x.dim())
    if scale.shape[0] != x.shape[axis]:
        raise Malformed(f"{scale.shape[0]} scales do not fit {x.shape[axis]} channels")
    points = call.run.make((scale.shape[0],), torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale.float(), points, axis, 0, 255)


@op("DynamicQuantizeLinear")
def dynamic_quantize(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x = call.tensor(0)
    return x.to(torch.uint8), x.detach().amax(), call.run.make((), torch.uint8)


@op("MatMulInteger")
def matmul_integer(call: Call) -> Tensor:
    return _sums(call, _product_shape(call.tensor(0), call.tensor(1)))


@op("QLinearMatMul")
def quantized_matmul(call: Call) -> Tensor:
    return _sums(call, _product_shape(call.tensor(0), call.tensor(3))).to(call.tensor(7).dtype)


@op("ConvInteger")
def conv_integer(call: Call) -> Tensor:
    return _sums(call, _convolved_shape(call, call.tensor(0), call.tensor(1)))


@op("QLinearConv")
def quantized_conv(call: Call) -> Tensor:
    return _sums(call, _convolved_shape(call, call.tensor(0), call.tensor(3))).to(call.tensor(7).dtype)


def _sums(call: Call, shape: tuple[int, ...]) -> Tensor:
    return call.run.make(shape, torch.int32)


def _product_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """As `matmul` gives it."""
    if not a.dim() or not b.dim() or a.shape[-1] != b.shape[max(0, b.dim() - 2)]:
        raise Malformed(f"{list(a.shape)} and {list(b.shape)} cannot be multiplied")
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError as error:
        raise Malformed(f"{list(a.shape)} and {list(b.shape)} cannot be multiplied") from error
    return (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.dim() > 1 else ()))


def _convolved_shape(call: Call, x: Tensor, weight: Tensor) -> tuple[int, ...]:
    if x.dim() != weight.dim() or x.dim() < 3 or x.shape[1] != weight.shape[1] * call.number("group", 1):
        raise Malformed(f"a kernel of {list(weight.shape)} does not fit an image of {list(x.shape)}")
    kernel = list(weight.shape[2:])
    strides, dilations, pads = sliding_window(call, x, kernel)
    rank = len(kernel)
    sizes = [
        (x.shape[2 + i] + pads[i] + pads[rank + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        for i in range(rank)
    ]
    if min(sizes) < 1:
        raise Malformed(f"a kernel of {kernel} does not fit an image of {list(x.shape)}")
    return (x.shape[0], weight.shape[0], *sizes)
