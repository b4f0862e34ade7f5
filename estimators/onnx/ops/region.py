"""ONNX operators on regions and offsets, with the memory of torchvision's CUDA kernels, which is what a script would train with.

Sources: torchvision/csrc/ops/cuda/{roi_align,roi_pool,deform_conv2d}_kernel.cu and .../autograd/*.cpp. Under autocast they
compute in fp32 (.../ops/autocast/*.cpp). On a CPU the same tensors live.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.estimators.onnx.ops.fallback import Make
from memopt.estimators.onnx.ops.registry import Call, Malformed, op

_IMAGES_AT_ONCE = 32
"""`kMaxParallelImgs`: images whose columns a deformable convolution holds together."""


class _Regions(torch.autograd.Function):
    """Values at regions of an image: keeps the regions, and the positions where maxima are taken."""

    @staticmethod
    def forward(
        ctx: Any, make: Make, x: Tensor, regions: Tensor, size: tuple[int, int], maxima: bool
    ) -> Tensor:
        shape = (regions.shape[0], x.shape[1], *size)
        ctx.image = x.shape
        ctx.save_for_backward(regions, *([make(shape, torch.int32)] if maxima else []))
        return make(shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradients[0].new_zeros(ctx.image), None, None, None


@op("RoiAlign")
def roi_align(call: Call) -> Tensor:
    x, boxes, batches = call.tensor(0), call.tensor(1), call.tensor(2)
    if x.dim() != 4 or boxes.dim() != 2 or boxes.shape[1] != 4 or batches.shape != boxes.shape[:1]:
        raise Malformed("it takes images, a box of 4 numbers each and the index of an image each")
    regions = torch.cat([batches.unsqueeze(1).to(boxes.dtype), boxes], 1)
    size = call.number("output_height", 1), call.number("output_width", 1)
    return _pooled(call, x, regions, size, maxima=False)


@op("MaxRoiPool")
def max_roi_pool(call: Call) -> Tensor:
    x, regions, size = call.tensor(0), call.tensor(1), call.numbers("pooled_shape") or []
    if x.dim() != 4 or regions.dim() != 2 or regions.shape[1] != 5 or len(size) != 2:
        raise Malformed("it takes images, regions of 5 numbers each and a shape of two")
    return _pooled(call, x, regions, (size[0], size[1]), maxima=True)


def _pooled(call: Call, x: Tensor, regions: Tensor, size: tuple[int, int], *, maxima: bool) -> Tensor:
    if min(size) < 1:
        raise Malformed(f"it pools to {list(size)}")
    kind = _kind(x)
    made: Tensor = _Regions.apply(call.run.make, x.to(kind), regions.to(kind), size, maxima)  # type: ignore[no-untyped-call]
    return made.to(x.dtype)


def _kind(x: Tensor) -> torch.dtype:
    """What torchvision's kernels compute in: autocast hands them fp32."""
    return torch.float32 if torch.is_autocast_enabled("cpu") else x.dtype


class _DeformConv(torch.autograd.Function):
    """`deform_conv2d`: saves its five inputs; what a pass holds at once is held here."""

    @staticmethod
    def forward(
        ctx: Any, make: Make, x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offset, mask, bias)
        shape = (x.shape[0], weight.shape[0], *offset.shape[2:])
        out, buffer = make(shape, x.dtype), make(shape, x.dtype)
        columns = make(_columns(x, weight, offset), x.dtype)
        summed = out + bias.view(1, -1, 1, 1)
        del buffer, columns  # which the kernel still holds here
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offset, mask, bias = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        x_grad, offset_grad, mask_grad = _input_gradients(x, weight, offset, mask)
        weight_grad = torch.zeros_like(weight)
        by_image = gradient.clone() if _at_once(x.shape[0]) > 1 else gradient
        columns = x.new_empty(_columns(x, weight, offset))
        del by_image, columns
        bias_grad = torch.ones_like(bias) * gradient.sum((0, 2, 3))
        return None, x_grad, weight_grad, offset_grad, mask_grad, bias_grad


def _input_gradients(
    x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward_gradient_inputs`, whose columns are gone when the weight's gradient is computed."""
    made = torch.zeros_like(x), torch.zeros_like(offset), torch.zeros_like(mask)
    x.new_empty(_columns(x, weight, offset))
    return made


def _at_once(batch: int) -> int:
    """The greatest divisor of the batch up to the bound."""
    return next((n for n in range(min(batch, _IMAGES_AT_ONCE), 1, -1) if batch % n == 0), 1)


def _columns(x: Tensor, weight: Tensor, offset: Tensor) -> tuple[int, int]:
    """Shape of the image's samples under every tap of the kernel."""
    return x.shape[1] * math.prod(weight.shape[2:]), _at_once(x.shape[0]) * math.prod(offset.shape[2:])


@op("DeformConv")
def deform_conv(call: Call) -> Tensor:
    x, weight, offset = call.tensor(0), call.tensor(1), call.tensor(2)
    bias, mask = call.optional(3), call.optional(4)
    groups = call.number("group", 1)
    _check(call, x, weight, offset, mask, groups)
    pads = call.numbers("pads") or [0] * 4
    uneven = pads[:2] != pads[2:]
    image = F.pad(x, [pads[1], pads[3], pads[0], pads[2]]) if uneven else x
    bias = x.new_zeros(weight.shape[0]) if bias is None else bias
    mask = x.new_zeros((x.shape[0], 1)) if mask is None else mask
    given = [t.to(_kind(x)) for t in (image, weight, offset, mask, bias)]
    made: Tensor = _DeformConv.apply(call.run.make, *given)  # type: ignore[no-untyped-call]
    return made.to(x.dtype)


def _check(call: Call, x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None, groups: int) -> None:
    """Raise `Malformed` unless the shapes fit each other."""
    if not x.dim() == weight.dim() == offset.dim() == 4:
        raise Malformed("its image, kernel and offsets must have 4 dimensions")
    strides = call.numbers("strides") or [1, 1]
    dilations = call.numbers("dilations") or [1, 1]
    pads = call.numbers("pads") or [0] * 4
    if len(strides) != 2 or len(dilations) != 2 or len(pads) != 4 or min(strides) < 1 or groups < 1:
        raise Malformed("its strides, dilations, pads and groups do not fit its kernel")
    sizes = [
        (x.shape[2 + i] + pads[i] + pads[2 + i] - dilations[i] * (weight.shape[2 + i] - 1) - 1) // strides[i]
        + 1
        for i in range(2)
    ]
    taps, sets = math.prod(weight.shape[2:]), call.number("offset_group", 1)
    fitting = (
        x.shape[1] == weight.shape[1] * groups
        and weight.shape[0] % groups == 0
        and tuple(offset.shape) == (x.shape[0], 2 * sets * taps, *sizes)
        and (mask is None or tuple(mask.shape) == (x.shape[0], sets * taps, *sizes))
    )
    if not fitting:
        raise Malformed(f"offsets of {list(offset.shape)} do not fit an output of {sizes}")
