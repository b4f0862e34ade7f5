"""A tensor's geometry, from which its encoded size follows without torch.

A codec works on the *cells* of a tensor: the stretch of memory from its first to its last element. So every stride pattern
(transposed, channels_last, expanded, with gaps) is exact; an expanded tensor costs its one row, a slice pays for its gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_CELLS = 1 << 18
"""Cells handled at a time on a CPU: a megabyte of fp32 stays in the cache, and the transient stays small."""

GPU_CHUNK_CELLS = 1 << 23
"""The same on a GPU: each more costs the host a dozen launches."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Of the types that codecs know."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without its data. `dtype` as torch spells it (`float32`), `device` as `str(torch.device)`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: str
    itemsize: int
    device: str = "cpu"

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def cells(self) -> int:
        """Elements of memory from the first to the last one."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))

    @property
    def plain_bytes(self) -> int:
        return self.cells * self.itemsize

    @property
    def rebuilt_bytes(self) -> int:
        """Bytes of a storage that gives the tensor back with its strides and its offset."""
        return (self.storage_offset + self.cells) * self.itemsize

    @property
    def is_on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def is_kernel_ready(self) -> bool:
        """Contiguous, or channels_last: kernels take these memory orders as they are."""
        dims = len(self.size)
        channels_last = (0, *range(2, dims), 1) if dims in (4, 5) else range(dims)
        return self.is_dense_in(range(dims)) or self.is_dense_in(channels_last)

    def is_dense_in(self, order: Sequence[int]) -> bool:
        """Do the elements lie one after the other, with the last dimension of `order` running fastest?"""
        expected = 1
        for dimension in reversed(order):
            if self.size[dimension] != 1 and self.stride[dimension] != expected:
                return False
            expected *= self.size[dimension]
        return True


def whole_storage(size_bytes: int, dtype: str, device: str) -> TensorMeta | None:
    """A storage as one row of `dtype`, as value codecs encode it; None for a type that codecs do not know."""
    item = ITEM_BYTES.get(dtype)
    return None if item is None else TensorMeta((size_bytes // item,), (1,), 0, dtype, item, device)


def bitmap_bytes(cells: int) -> int:
    return -(-cells // 8)


def chunk_cells(meta: TensorMeta) -> int:
    """How many cells of the tensor are handled at a time."""
    return CHUNK_CELLS if meta.is_on_cpu else GPU_CHUNK_CELLS
