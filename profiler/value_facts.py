"""What can be told of a saved storage's values, for codecs whose size depends on them. Read by numpy: torch's memory is being measured.

Only of storages on a CPU: on a GPU each look would wait for the device, and none of these codecs is planned for there.
A first look at a few thousand elements tells of most storages that nothing can be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memopt.codecs.meta import CHUNK_CELLS
from memopt.instrument.arrays import array_over
from memopt.instrument.torch_internals import DisableTorchDispatch
from memopt.value_facts import ValueFacts

LEAST_BYTES = 1 << 18
"""Of a storage that is looked at. What a smaller one could save is no share of a peak for which anybody plans."""

_FEW = 1 << 12
"""Elements that are looked at first, spread over the storage."""
_DENSE = 0.95
"""With more of the few not zero, the rest is not counted: a bitmap could save nothing that is worth its time."""
_LEAST_TOLD = 1 << 10
"""Floats that are neither 0 nor -0.0, without which nothing is told of a narrower type: each type holds what a factor that is zero at first
(LoRA's) has made. That so many other floats fit bf16 by chance has a likelihood of 2^-16 each."""
_BITS: dict[int, Any] = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}  # fmt: skip
_INTEGERS = (torch.int16, torch.int32, torch.int64)

Cells = NDArray[Any]


def facts_of(storage: int, tensor: Tensor) -> ValueFacts | None:
    """Of the storage under `tensor`, which has number `storage`; None where there is nothing to tell."""
    whole = tensor.untyped_storage().nbytes()
    if whole < LEAST_BYTES or tensor.device.type != "cpu" or tensor.element_size() not in _BITS:
        return None
    as_integers, unsigned = _BITS[tensor.element_size()]
    guard = DisableTorchDispatch()  # or a recording counts these among the script's ops
    try:
        row = tensor.detach().as_strided((whole // tensor.element_size(),), (1,), 0).view(as_integers)
        bits: Cells = array_over(row).view(unsigned)
    except (RuntimeError, NotImplementedError):
        return None  # of a tensor that shows its bytes to nobody
    finally:
        del guard
    few = bits[:: max(1, len(bits) // _FEW)]
    share = _share_set(bits) if _share_set(few) <= _DENSE else 1.0
    low = high = None
    if tensor.dtype in _INTEGERS:
        signed = bits.view(f"i{bits.itemsize}")
        low, high = int(signed.min()), int(signed.max())
    exact_as = _narrower_float(tensor.dtype, bits, few)
    if share == 1.0 and low is None and not exact_as:
        return None
    return ValueFacts(
        storage=storage,
        dtype=str(tensor.dtype).removeprefix("torch."),
        nonzero_share=share,
        low=low,
        high=high,
        exact_as=exact_as,
    )


def _share_set(bits: Cells) -> float:
    return int(np.count_nonzero(bits)) / len(bits)


def _fits_bfloat16(bits: Cells) -> bool:
    """Its low half is empty: what bf16 leaves away of fp32."""
    return not np.any(bits & np.uint32(0xFFFF))


def _fits_float16(bits: Cells) -> bool:
    with np.errstate(over="ignore"):
        back = bits.view(np.float32).astype(np.float16).astype(np.float32)
    return bool(np.array_equal(back.view(np.uint32), bits))


def _fits_float32(bits: Cells) -> bool:
    with np.errstate(over="ignore"):
        back = bits.view(np.float64).astype(np.float32).astype(np.float64)
    return bool(np.array_equal(back.view(np.uint64), bits))


_HALVES: dict[torch.dtype, dict[str, Callable[[Cells], bool]]] = {
    torch.float32: {"bfloat16": _fits_bfloat16, "float16": _fits_float16},
    torch.float64: {"float32": _fits_float32},
}


def _narrower_float(dtype: torch.dtype, bits: Cells, few: Cells) -> str:
    """The type of half the bytes that holds all of `bits`; the first chunk that it does not hold ends the search."""
    for name, fits in _HALVES.get(dtype, {}).items():
        if fits(few) and all(fits(part) for part in _chunks(bits)):
            told = sum(int(np.count_nonzero(part << 1)) for part in _chunks(bits))
            return name if told >= _LEAST_TOLD else ""
    return ""


def _chunks(bits: Cells) -> Iterator[Cells]:
    for at in range(0, len(bits), CHUNK_CELLS):
        yield bits[at : at + CHUNK_CELLS]
