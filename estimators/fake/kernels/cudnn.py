"""cuDNN's convolution workspaces: `HiddenMemory.conv_workspace` of what each kernel reads and writes.

Forward reads the input and the filter; the input's gradient the output's gradient and the filter; the filter's gradient the
input and the output's gradient. Of the published rows none but what was measured counts; the rest is told as what one
convolution may take on top, for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memopt.estimators.fake.kernels.hidden import hidden

aten = torch.ops.aten


_TRIED = 4
"""Of a benchmark's trials, the workspace by what a kernel reads and writes: Winograd's tiles of 4x4 for 2x2 (Lavin and Gray, 2016)
take four times both where they are not fused. Those of FFT kernels may be larger, and are refused where memory is short."""


def _of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _kernel(
    recorder: Any, reads: tuple[Tensor, Tensor], writes: int, input: Tensor, weight: Tensor, groups: int
) -> int:
    """The workspace to count for one kernel; what it may take beyond is told."""
    if not torch.backends.cudnn.enabled:
        return 0
    last = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    amount = recorder.hidden.conv_workspace(
        read_bytes=_of(reads[0]) + _of(reads[1]),
        written_bytes=writes,
        dtype=str(input.dtype).removeprefix("torch."),
        weight=tuple(weight.shape),
        channels_last=input.dim() in (4, 5)
        and input.is_contiguous(memory_format=last)
        and not input.is_contiguous(),
        groups=groups,
        allow_tf32=torch.backends.cudnn.allow_tf32,
    )
    high = amount.high_bytes
    if torch.backends.cudnn.benchmark:
        recorder.guesser.remark(
            "torch.backends.cudnn.benchmark: the first step tries kernels with large workspaces, so more may be reserved"
        )
        high = max(high, _TRIED * (_of(reads[0]) + _of(reads[1]) + writes))
    recorder.may_take(high - amount.size_bytes)
    return int(amount.size_bytes)


@hidden("cuda", aten.convolution.default)
def _forward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    input, weight, groups = args[0], args[1], args[8]
    return (_kernel(recorder, (input, weight), _of(result), input, weight, groups),)


@hidden("cuda", aten.convolution_backward.default)
def _backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    grad, input, weight, groups, mask = args[0], args[1], args[2], args[9], args[10]
    sizes = []
    if mask[0]:
        sizes.append(_kernel(recorder, (grad, weight), _of(input), input, weight, groups))
    if mask[1]:
        sizes.append(_kernel(recorder, (grad, input), _of(weight), input, weight, groups))
    return sizes
