"""cuDNN's convolution workspaces, from how its tensor-core kernels work.

From Ampere on, dense convolutions in TF32, fp16 and bf16 run on kernels that read NHWC. Tensors in torch's default NCHW layout are
first rewritten (`nchwToNhwcKernel` in every profile) into the workspace, which PyTorch takes from its caching allocator:
the input and the filter for the forward pass, the output's gradient and the filter for the input's gradient, input and output's
gradient for the filter's gradient. Tensors already in channels_last need none, nor do 1x1 filters.

Which kernel cuDNN takes cannot be known here, and most of the public measurements (groundtruth/xmem_runs.csv) fit no workspace at
all better than this one, so it is not in the estimate: it is told as what one convolution may take on top, for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memopt.estimators.fake.hidden import hidden

aten = torch.ops.aten


def _of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rewrites(recorder: Any, input: Tensor, weight: Tensor, groups: int) -> bool:
    if not torch.backends.cudnn.enabled or groups != 1 or recorder.capability < (8, 0) or input.dim() < 4:
        return False
    if input.dtype is torch.float32 and not torch.backends.cudnn.allow_tf32:
        return False
    if input.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    if all(size == 1 for size in weight.shape[2:]):
        return False  # a matrix product as it lies
    align = 16 // input.element_size()
    if weight.shape[0] % align or weight.shape[1] % align:
        return False
    last = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    return not (input.is_contiguous(memory_format=last) and not input.is_contiguous())


@hidden("cuda", aten.convolution.default)
def _forward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    input, weight, groups = args[0], args[1], args[8]
    if _rewrites(recorder, input, weight, groups):
        recorder.may_take(_of(input) + _of(weight))
    return ()


@hidden("cuda", aten.convolution_backward.default)
def _backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    grad, input, weight, groups, mask = args[0], args[1], args[2], args[9], args[10]
    if _rewrites(recorder, input, weight, groups) and mask[1]:
        recorder.may_take(_of(grad) + _of(input))
    return ()
