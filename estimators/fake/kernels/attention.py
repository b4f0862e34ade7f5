"""Which kernel `scaled_dot_product_attention` takes: rules of ATen/native/transformers/{cuda/sdp_utils,sdp_utils_cpp}.cpp.

Not followed: cuDNN's attention (torch keeps it last in the order of preference), nested tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from memopt.estimators.fake.torch_internals import jagged_attention

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

Attention = Callable[..., Tensor]


def attention(on_cuda: Callable[[Tensor], bool], capability: tuple[int, int]) -> Attention:
    """A replacement for the composite op that chooses as C++ would on the tensors' device."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        if on_cuda(query):
            if _flash(*given, enable_gqa, capability):
                return _run_flash(query, key, value, dropout_p, is_causal, scale)
            if not enable_gqa and _efficient(*given, capability):
                return _run_efficient(
                    query, key, value, _as_bias(attn_mask, query.dtype), dropout_p, is_causal, scale
                )
        elif _flash_cpu(*given, enable_gqa):
            mask = _as_bias(attn_mask, query.dtype)
            found = aten._scaled_dot_product_flash_attention_for_cpu.default(
                query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
            )
            return first(found)
        return first(
            aten._scaled_dot_product_attention_math.default(
                query, key, value, _as_bias(attn_mask, query.dtype), dropout_p, is_causal, None, scale=scale,
                enable_gqa=enable_gqa,
            )
        )  # fmt: skip

    return scaled_dot_product_attention


def first(results: Any) -> Tensor:
    """The output proper of an op that also returns what its backward needs."""
    out: Tensor = results[0]
    return out


def jagged(capability: tuple[int, int]) -> None:
    """Let nested tensors of the jagged layout choose among CUDA's kernels, which C++ refuses for tensors of the cpu."""
    module = jagged_attention()

    def flash(given: Any, debug: bool = False) -> bool:
        query = given.query
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and capability >= (8, 0)
            and query.dtype in _HALF
            and given.attn_mask is None
            and query.shape[-1] <= 256
        )

    def efficient(given: Any, debug: bool = False) -> bool:
        dtype, width = given.query.dtype, given.query.shape[-1]
        known = dtype in (torch.float32, *_HALF) and not (dtype is torch.bfloat16 and capability < (8, 0))
        aligned = known and width % _alignment(dtype, capability) == 0
        return torch.backends.cuda.mem_efficient_sdp_enabled() and aligned

    module.can_use_flash_attention, module.can_use_efficient_attention = flash, efficient


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """convert_boolean_attn_mask: `False` becomes minus infinity."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _dense(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.dtype == key.dtype == value.dtype
        and min(query.shape[2], key.shape[2]) > 0
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and query.shape[0] == key.shape[0] == value.shape[0]
    )


def _same_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    if enable_gqa:
        return key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    return query.shape[1] == key.shape[1] == value.shape[1]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    enable_gqa: bool, capability: tuple[int, int],
) -> bool:  # fmt: skip
    width = query.shape[-1]
    narrow = width <= 192 or (dropout_p == 0 or capability in ((8, 0), (9, 0)))
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and query.dtype in _HALF
        and mask is None
        and _dense(query, key, value)
        and _same_heads(query, key, value, enable_gqa)
        and width == key.shape[-1] == value.shape[-1] <= 256
        and narrow
        and not (is_causal and query.shape[2] != key.shape[2])
    )


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    capability: tuple[int, int],
) -> bool:  # fmt: skip
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not _dense(query, key, value):
        return False
    if query.dtype is torch.bfloat16 and capability < (8, 0):
        return False
    if query.dtype not in (torch.float32, *_HALF) or not _same_heads(query, key, value, False):
        return False
    align = _alignment(query.dtype, capability)
    if query.shape[-1] % align or value.shape[-1] % align or query.shape[-1] != key.shape[-1]:
        return False
    return mask is None or capability >= (8, 0) or not mask.requires_grad


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    half = dtype in _HALF
    tensor_cores = capability >= ((7, 0) if half else (8, 0))
    least = 4 if capability >= (8, 0) else 1
    return max(least, 128 // (16 if half else 32)) if tensor_cores else least


def _flash_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    enable_gqa: bool,
) -> bool:  # fmt: skip
    kinds = (torch.float64, torch.float32, *_HALF)
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and dropout_p == 0
        and query.dtype in kinds
        and _dense(query, key, value)
        and _same_heads(query, key, value, enable_gqa)
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and (mask is None or _mask_fits(mask, query, key))
    )


def _mask_fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    if mask.requires_grad:
        return False
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if mask.dim() not in (2, 4):
        return False
    return all(have in (1, want) for have, want in zip(mask.shape[::-1], full[::-1], strict=False))


def _run_flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    width = query.shape[-1]
    odd = -width % 8
    if odd:
        query, key, value = (F.pad(x, (0, odd)) for x in (query, key, value))
        scale = scale if scale is not None else width**-0.5
    out: Tensor = aten._scaled_dot_product_flash_attention.default(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :width] if odd else out


def _run_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if bias is not None:
        odd = -bias.shape[-1] % 8
        if odd:
            bias = F.pad(bias, (0, odd))[..., : key.shape[2]]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value) if x is not None)
    out: Tensor = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, saves, dropout_p, is_causal, scale=scale
    )[0]
    return out
