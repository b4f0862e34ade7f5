"""bitsandbytes on a GPU that is not there: its operators have fake kernels, what lies outside them is answered here.

A paged optimizer's state is unified memory, which no caching allocator sees. A 4-bit product of many rows dequantizes
its weight first (`backends/cuda/ops.py: _dequant_linear_fallback`), which its fake kernel does not show.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from memopt.estimators.fake.kernels.hidden import hidden
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.instrument.script.on_import import call_after_import

_ROWS_CUSTOM = 1536
"""Rows beyond which no fused kernel is taken on any NVIDIA GPU."""


def install(recorder: FakeRecorder) -> None:
    """Patch bitsandbytes when the script imports it."""
    call_after_import("bitsandbytes.functional", lambda: _unified(recorder))
    call_after_import("bitsandbytes._ops", _products)


def _unified(recorder: FakeRecorder) -> None:
    functional: Any = sys.modules["bitsandbytes.functional"]

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        recorder.guesser.remark(
            "paged optimizer state of bitsandbytes was counted as host memory: the driver moves it to and fro"
        )
        with recorder.claiming("cpu"):
            made: Any = torch.empty(shape, dtype=dtype)
        made.is_paged, made.page_deviceid = True, 0
        return made  # type: ignore[no-any-return]

    functional.get_paged = get_paged
    functional.prefetch_tensor = lambda *args, **kwargs: None
    functional.fill = lambda *args, **kwargs: None
    functional.is_on_gpu = lambda tensors: True


def _products() -> None:
    operators = torch.ops.bitsandbytes
    if hasattr(operators, "gemm_4bit"):
        hidden("cuda", operators.gemm_4bit.default)(_dequantized)


def _dequantized(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    """The whole weight in the input's type, and the scales of its blocks where those are quantized too."""
    left, shape, block = args[0], args[2], args[4]
    rows = left.numel() // left.shape[-1]
    if _fused(recorder, left, shape, rows, block):
        return ()
    nested = kwargs.get("absmax_8bit")
    scales = 2 * 4 * nested.numel() if nested is not None else 0
    return (math.prod(shape) * left.element_size() + scales,)


def _fused(recorder: Any, left: torch.Tensor, shape: Any, rows: int, block: int) -> bool:
    """What bitsandbytes' own rule says of the product; without one (older versions) only that of few rows."""
    if rows > _ROWS_CUSTOM or left.shape[-1] % block:
        return False
    with suppress(KeyError, AttributeError):
        rule: Any = sys.modules["bitsandbytes.backends.cuda.ops"]._gemm_4bit_use_custom_fn
        return bool(rule(0, left.dtype, rows, shape[0], left.shape[-1]))
    return rows <= 4
