"""An encoded tensor, and the geometry that all codecs share: cells out of a tensor, a tensor out of cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from memopt.codecs.meta import CHUNK_CELLS, GPU_CHUNK_CELLS, TensorMeta
from memopt.instrument import ops

_BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Encoded:
    """What is held instead of a tensor. `payload` lives in memory that torch allocated, so the allocator counts it."""

    codec: str
    meta: TensorMeta
    payload: tuple[torch.Tensor, ...] = ()
    params: Mapping[str, object] = field(default_factory=dict)

    @property
    def encoded_bytes(self) -> int:
        return sum(part.untyped_storage().nbytes() for part in self.payload)


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """The geometry of `tensor`, free of its data."""
    return TensorMeta(
        size=tuple(tensor.size()),
        stride=tuple(tensor.stride()),
        storage_offset=int(tensor.storage_offset()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.element_size(),
        device=str(tensor.device),
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is ordinary memory that a codec may read: a plain tensor whose bytes are there."""
    if not ops.is_plain(tensor):
        return False
    try:
        held_bytes = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # functorch wrappers have no storage of their own
        return False
    return held_bytes > 0 or tensor.numel() == 0


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under `tensor` as one row of its dtype: what a value codec encodes on behalf of every view."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def cells_of(tensor: torch.Tensor, meta: TensorMeta | None = None) -> torch.Tensor:
    """The memory from the first to the last element of `tensor`, flat; no copy. `meta`: its geometry, where that is known."""
    meta = meta or meta_of(tensor)
    return tensor.detach().as_strided((meta.cells,), (1,), meta.storage_offset)


def bits_of(cells: torch.Tensor) -> torch.Tensor:
    """`cells` as integers of the same width (NaN payloads and -0.0 are told apart)."""
    return cells.view(_BIT_DTYPES[cells.element_size()])


def torch_dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def new_cells(meta: TensorMeta) -> tuple[torch.Tensor, torch.Tensor]:
    """A fresh tensor with the geometry of `meta`, and its cells, to be filled."""
    if meta.storage_offset == 0:
        tensor = torch.empty_strided(meta.size, meta.stride, dtype=torch_dtype(meta), device=meta.device)
        return tensor, tensor.as_strided((meta.cells,), (1,))
    buffer = torch.empty(meta.storage_offset + meta.cells, dtype=torch_dtype(meta), device=meta.device)
    tensor = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    tensor.set_(buffer.untyped_storage(), meta.storage_offset, meta.size, meta.stride)
    return tensor, buffer[meta.storage_offset :]


def part_of(row: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """`row[begin:end]`, or `row` itself where that is all of it."""
    return row if begin == 0 and end >= row.numel() else row[begin:end]


def chunks_of(count: int, device: str | torch.device) -> Iterator[slice]:
    """Slices that cover `count` cells; each but the last is a multiple of eight long."""
    step = CHUNK_CELLS if str(device) == "cpu" else GPU_CHUNK_CELLS
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
