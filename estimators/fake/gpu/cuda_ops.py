"""CUDA's choice of operators, imposed on fake cpu tensors by overriding composite ops in the dispatcher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memopt.estimators.fake.kernels.attention import attention, jagged
from memopt.estimators.fake.kernels.cells import cell_choices
from memopt.estimators.fake.kernels.cudnn_rnn import recurrent_choices
from memopt.estimators.fake.kernels.hidden import hidden
from memopt.estimators.fake.torch_internals import FakeTensor, foreach_types
from memopt.estimators.hidden.hidden_memory import (
    efficient_attention_backward,
    flash_attention_backward,
    packed_flash_attention_backward,
)

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder
    from memopt.estimators.fake.values.choices import Overrides

aten = torch.ops.aten


def device_choices(overrides: Overrides, recorder: Recorder) -> None:
    """What depends on the device: attention kernels on any; dropout masks, batch norm and softmax on CUDA."""

    def on_cuda(tensor: Tensor) -> bool:
        return recorder.device_of(tensor) == "cuda"

    overrides.add("scaled_dot_product_attention", attention(on_cuda, recorder.capability))
    if recorder.target != "cuda":
        return
    jagged(recorder.capability)
    if FakeTensor not in foreach_types:  # else optimizers go through fake parameters one by one
        foreach_types.append(FakeTensor)
    recurrent_choices(overrides, recorder)
    cell_choices(overrides, recorder)
    overrides.add("dropout", _dropout)
    overrides.add("batch_norm", _batch_norm)
    overrides.add("softmax.int", _softmax(aten._softmax.default))
    overrides.add("log_softmax.int", _softmax(aten._log_softmax.default))


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """ATen/native/Dropout.cpp: the fused kernel with its one-byte mask, as for any CUDA tensor."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p < 1:
        return aten.native_dropout.default(input, p, train)[0]  # type: ignore[no-any-return]
    return input.mul(torch.zeros_like(input))


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """ATen/native/Normalization.cpp: cuDNN for training in fp32 and fp16 from three dimensions up, else the native kernel."""
    cudnn = (
        cudnn_enabled
        and training
        and input.dim() >= 3
        and weight is not None
        and bias is not None
        and input.dtype in (torch.float32, torch.float16)
        and weight.dtype is torch.float32
        and (running_mean is None) == (running_var is None)
    )
    if cudnn:
        out = aten.cudnn_batch_norm.default(
            input.contiguous() if not _dense(input) else input, weight, bias, running_mean, running_var, True, momentum, eps
        )  # fmt: skip
    else:
        out = aten.native_batch_norm.default(
            input, weight, bias, running_mean, running_var, training, momentum, eps
        )
    return out[0]  # type: ignore[no-any-return]


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _softmax(kernel: Any) -> Any:
    """ATen/native/SoftMax.cpp: fp16 to fp32 happens inside the kernel; any other change of type is a copy first."""

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if input.dtype is torch.float16 and dtype is torch.float32:
            return kernel(input, dim, True)  # type: ignore[no-any-return]
        return kernel(input if dtype is None else input.to(dtype), dim, False)  # type: ignore[no-any-return]

    return softmax


@hidden("cuda", aten._scaled_dot_product_flash_attention_backward.default)
def _flash_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    batch, heads, length, width = args[1].shape
    taken = flash_attention_backward(
        batch=batch,
        heads=heads,
        kv_heads=args[2].shape[1],
        query_length=length,
        key_length=args[2].shape[2],
        head_dim=width,
        item_bytes=args[1].element_size(),
        splits=_splits(recorder, batch * heads),
    )
    return (sum(each.size_bytes for each in taken),)


@hidden("cuda", aten._flash_attention_backward.default)
def _packed_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int] | None:
    query, key, ends = args[1], args[2], args[6]
    if query.dim() != 3 or ends is None:
        return None
    sequences = ends.numel() - 1
    taken = packed_flash_attention_backward(
        sequences=sequences,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        queries=query.shape[0],
        keys=key.shape[0],
        head_dim=query.shape[2],
        item_bytes=query.element_size(),
        splits=_splits(recorder, sequences * query.shape[1]),
    )
    return (sum(each.size_bytes for each in taken),)


def _splits(recorder: Any, blocks: int) -> int:
    """Into how many parts the gradient of the queries is summed, so that the order of sums is the same every time."""
    strict = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return (recorder.hidden.device.multiprocessors + blocks - 1) // max(1, blocks) if strict else 1


@hidden("cuda", aten._scaled_dot_product_efficient_attention_backward.default)
def _efficient_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    batch, heads, length, width = args[1].shape
    taken = efficient_attention_backward(
        batch=batch,
        heads=heads,
        query_length=length,
        head_dim=width,
        item_bytes=args[1].element_size(),
    )
    return (sum(each.size_bytes for each in taken),)
