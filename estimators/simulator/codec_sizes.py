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


def encode_transient_bytes(codec: str, meta: TensorMeta, params: Mapping[str, object] | None = None) -> int:
    """Bytes needed for a moment while encoding, beside the tensor and what is held afterwards."""
    chunk, params = min(meta.cells, _chunk_of(meta)), params or {}
    if codec in ("nothing", "narrow_int"):
        return 0
    if codec == "pool_index":
        numel, held = meta.numel, _tap_bytes(meta, params)
        return max(
            numel if held < numel else 0,
            numel - held + 18 * _pooled_piece(meta) + _origins_bytes(meta, params),
        )
    per_cell = {
        "predicate": _asked_bytes(str(params.get("test")), meta),
        "two_valued": 0,
        "exact_cast": 3 * meta.itemsize // 2,
        "zero_bitmap": 0,
    }
    in_torch = 0 if meta.device == "cpu" else _BITS_BYTES[codec]
    return chunk * (per_cell[codec] + in_torch)


_BITS_BYTES = {"predicate": 3, "two_valued": 5, "exact_cast": 0, "zero_bitmap": 12}
"""Per cell, what numpy does on a CPU without torch's memory: comparing, packing bits, picking the cells that are not zero."""


def _asked_bytes(test: str, meta: TensorMeta) -> int:
    """Per cell, the answers of this chunk and the one before; most questions are put by a kernel, to a gradient of ones."""
    if test == "mask":
        return 0
    held_bytes, answer_bytes = {"relu": (1, 1), "clamp": (2, 1)}.get(test, (2 * meta.itemsize, meta.itemsize))
    return held_bytes + (answer_bytes if meta.cells > _chunk_of(meta) else 0)


def decode_transient_bytes(codec: str, meta: TensorMeta, params: Mapping[str, object] | None = None) -> int:
    """Bytes needed for a moment while decoding, beside what is held and what is given back."""
    chunk, params = min(meta.cells, _chunk_of(meta)), params or {}
    if codec == "nothing":
        return meta.rebuilt_bytes if decoded_bytes(codec, meta) == 0 else 0
    if codec == "pool_index":
        widened = meta.numel if _tap_bytes(meta, params) < meta.numel else 0
        return max(2 * widened, widened + 20 * _pooled_piece(meta) + _origins_bytes(meta, params))
    in_torch = {"predicate": 3 + meta.itemsize, "two_valued": 2, "exact_cast": 8, "zero_bitmap": 14}
    return 0 if meta.device == "cpu" else chunk * in_torch.get(codec, 0)


def _origins_bytes(meta: TensorMeta, params: Mapping[str, object]) -> int:
    """One int64 for each place of an output plane."""
    kernel = params.get("kernel_size")
    return 8 * math.prod(meta.size[-len(kernel) :] if isinstance(kernel, list | tuple) else meta.size[1:])


def _pooled_piece(meta: TensorMeta) -> int:
    """Indices handled at a time: whole planes, or whole samples where memory is not in that order."""
    in_order = len(meta.size) > 3 and _is_dense_in(meta, range(len(meta.size)))
    unit = math.prod(meta.size[2:] if in_order else meta.size[1:])
    return min(meta.numel, max(1, CHUNK_CELLS // max(1, unit)) * unit)


def pieces_of(codec: str, meta: TensorMeta) -> int:
    """How many times the codec's kernels run for one tensor."""
    piece = _pooled_piece(meta) if codec == "pool_index" else _chunk_of(meta)
    return -(-meta.cells // max(1, piece))


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
