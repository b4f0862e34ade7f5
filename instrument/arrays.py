"""A tensor's bytes as an array of numpy's, without a trace on the tensor.

`Tensor.numpy` marks the storage for good: it cannot be resized any more, as one whose bytes are numpy's own (`ops.is_lent`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def array_over(row: Tensor) -> NDArray[Any]:
    """The flat, dense `row` on a CPU, of integers or bools. What is written to the array is in the tensor. The array keeps `row` alive."""
    dtype = np.dtype(str(row.dtype).removeprefix("torch."))
    if not row.numel():
        return np.empty(0, dtype)
    window = (ctypes.c_byte * row.nbytes).from_address(row.data_ptr())
    window.tensor = row  # type: ignore[attr-defined]
    found: NDArray[Any] = np.frombuffer(memoryview(window), dtype)
    return found
