"""How many bytes each codec holds and needs, from a tensor's shape alone, so that a planner can ask without torch.

A codec works on the *cells* of a tensor: the stretch of memory from its first to its last element. So every stride pattern
(transposed, channels_last, expanded, with gaps) is exact; an expanded tensor costs its one row, a slice pays for its gaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHUNK_CELLS = 1 << 18
"""Cells handled at a time on a CPU: a megabyte of fp32 stays in the cache, and the transient stays small."""

GPU_CHUNK_CELLS = 1 << 22
ALLOCATION_BYTES = 64

_NARROW_BYTES = {"uint8": 1, "int16": 2, "int32": 4}


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
    def rebuilt_bytes(self) -> int:
        """Bytes of a storage that gives the tensor back with its strides and its offset."""
        return (self.storage_offset + self.cells) * self.itemsize


def bitmap_bytes(cells: int) -> int:
    return -(-cells // 8)


def predicted_bytes(codec: str, meta: TensorMeta, params: Mapping[str, object] | None = None) -> int:
    """Bytes held between forward and backward. Data-dependent codecs take what the profile found: `nonzero_cells` for
    `zero_bitmap`, `narrow_dtype` for `narrow_int`; without it the size is the plain one (no promise made)."""
    params = params or {}
    cells, plain_bytes = meta.cells, meta.cells * meta.itemsize
    if codec == "nothing":
        return 0
    if codec == "predicate":
        return bitmap_bytes(cells)
    if codec == "two_valued":
        return bitmap_bytes(cells) + 2 * meta.itemsize
    if codec == "pool_index":
        return _tap_bytes(meta, params)
    if codec == "narrow_int":
        return cells * _NARROW_BYTES.get(str(params.get("narrow_dtype")), meta.itemsize)
    if codec == "exact_cast":
        return plain_bytes // 2
    if codec == "zero_bitmap":
        nonzero = params.get("nonzero_cells")
        return plain_bytes if not isinstance(nonzero, int) else bitmap_bytes(cells) + nonzero * meta.itemsize
    raise KeyError(codec)


def _tap_bytes(meta: TensorMeta, params: Mapping[str, object]) -> int:
    kernel = params.get("kernel_size")
    taps = math.prod(kernel) if isinstance(kernel, list | tuple) else 256
    return -(-meta.numel // 2) if taps <= 16 else meta.numel


def encode_transient_bytes(codec: str, meta: TensorMeta) -> int:
    """Bytes needed for a moment while encoding, beside the tensor and what is held afterwards."""
    chunk = min(meta.cells, _chunk_of(meta))
    per_cell = {
        "nothing": 0,
        "narrow_int": 0,
        "predicate": 5 + 2 * meta.itemsize,
        "two_valued": 4,
        "exact_cast": 12,
        "zero_bitmap": 12,
    }
    if codec == "pool_index":
        return meta.numel + 40 * chunk
    return chunk * per_cell[codec]


def decode_transient_bytes(codec: str, meta: TensorMeta) -> int:
    """Bytes needed for a moment while decoding, beside what is held and what is given back."""
    chunk = min(meta.cells, _chunk_of(meta))
    if codec == "nothing":
        return meta.rebuilt_bytes if decoded_bytes(codec, meta) == 0 else 0
    if codec == "pool_index":
        return 2 * meta.numel + 40 * chunk
    per_cell = {
        "narrow_int": 0,
        "predicate": 3 + meta.itemsize,
        "two_valued": 2,
        "exact_cast": 8,
        "zero_bitmap": 14,
    }
    return chunk * per_cell[codec]


def decoded_bytes(codec: str, meta: TensorMeta, params: Mapping[str, object] | None = None) -> int:
    """Bytes alive while the reader runs: 0 for an empty stand-in, else the tensor's own."""
    return 0 if codec == "nothing" and is_empty_stand_in(meta, params or {}) else meta.rebuilt_bytes


def is_empty_stand_in(meta: TensorMeta, params: Mapping[str, object]) -> bool:
    """Whether a value that is never read comes back over a storage of 0 bytes; only where no kernel would copy it first."""
    return meta.device == "cpu" and params.get("stand_in", "empty") == "empty" and _is_kernel_ready(meta)


def _is_kernel_ready(meta: TensorMeta) -> bool:
    """Contiguous, or channels_last: kernels take these memory orders as they are."""
    dims = len(meta.size)
    channels_last = (0, *range(2, dims), 1) if dims in (4, 5) else range(dims)
    return _is_dense_in(meta, range(dims)) or _is_dense_in(meta, channels_last)


def _is_dense_in(meta: TensorMeta, order: Sequence[int]) -> bool:
    expected = 1
    for dimension in reversed(order):
        if meta.size[dimension] != 1 and meta.stride[dimension] != expected:
            return False
        expected *= meta.size[dimension]
    return True


def _chunk_of(meta: TensorMeta) -> int:
    return CHUNK_CELLS if meta.device == "cpu" else GPU_CHUNK_CELLS
