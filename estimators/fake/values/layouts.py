"""How a CPU's kernels lay out results, where torch's rules for fake tensors say otherwise: in the format that an input suggests.

Whether a later product reads its operand as it lies, or a copy, hangs on this: a batch norm over transposed channels gives
contiguous ones, so that a linear layer behind it no longer takes its fused form. Found by comparing both on inputs of eight layouts.
"""

from __future__ import annotations

from typing import Any

import torch

from memopt.estimators.fake.torch_internals import FakeTensor

aten = torch.ops.aten

_SUGGESTED_BY = {
    aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1, aten.roll.default: 0,
    aten.channel_shuffle.default: 0, aten.reflection_pad2d_backward.default: 1,
}  # fmt: skip
"""ATen/native: Normalization.cpp, TensorTransformations.cpp, ChanelShuffle.cpp, ReflectionPad.cpp; by operand."""
_CONTIGUOUS = frozenset((aten.glu_backward.default, aten.rrelu_with_noise.default))
_KNOWN = _SUGGESTED_BY.keys() | _CONTIGUOUS


def as_laid_out(recorder: Any, func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """`result`, its first tensor in the layout that the kernel gives it."""
    if recorder.target != "cpu" or func not in _KNOWN:
        return result
    several = isinstance(result, tuple)
    first = result[0] if several else result
    if type(first) is not FakeTensor or not first.numel():
        return result
    wanted = torch.contiguous_format if func in _CONTIGUOUS else _suggested(args[_SUGGESTED_BY[func]])
    with recorder.fake_mode:
        made = torch.empty(first.shape, dtype=first.dtype, memory_format=wanted)
    if made.stride() == first.stride():
        return result
    return (made, *result[1:]) if several else made


def _suggested(tensor: torch.Tensor) -> torch.memory_format:
    """`TensorBase::suggest_memory_format`: channels last, if strides grow from the channels outwards."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    dims, strides = tensor.dim(), tensor.stride()
    if dims not in formats or not strides[1]:
        return torch.contiguous_format
    least = 0
    for dim in (1, *range(dims - 1, 1, -1), 0):
        if strides[dim] < least or (dim == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[dim] * max(tensor.shape[dim], 1)
    return formats[dims]
