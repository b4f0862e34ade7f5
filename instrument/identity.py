"""Which storages a tensor's bytes are in: the same rule for a run that is recorded and for one that is pretended.

A storage is known by its address (`untyped_storage()._cdata`) while it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from memopt.instrument.ops import PLAIN_TYPES
from memopt.instrument.torch_internals import DisableTorchDispatch, is_wrapper

NO_STORAGE = (NotImplementedError, RuntimeError, AttributeError, ValueError)
"""What sparse, wrapped and lazy tensors raise when they are asked for their storage."""


def _of_rows(sparse: Tensor) -> tuple[Tensor, ...]:
    return sparse.crow_indices(), sparse.col_indices(), sparse.values()


def _of_columns(sparse: Tensor) -> tuple[Tensor, ...]:
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


_SPARSE: Mapping[torch.layout, Callable[[Tensor], tuple[Tensor, ...]]] = {
    torch.sparse_coo: lambda sparse: (sparse._indices(), sparse._values()),
    torch.sparse_csr: _of_rows,
    torch.sparse_bsr: _of_rows,
    torch.sparse_csc: _of_columns,
    torch.sparse_bsc: _of_columns,
}


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the bytes: itself, or, of a tensor made of tensors (DTensor, a quantized weight, a sparse one), those inside."""
    if type(tensor) in PLAIN_TYPES and tensor.layout in _SPARSE:
        guard = DisableTorchDispatch()
        try:
            parts = _SPARSE[tensor.layout](tensor.detach())
        finally:
            del guard
        yield from parts
        return
    if not is_wrapper(tensor):
        yield tensor
        return
    try:
        held = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    except NO_STORAGE:
        return  # half made
    for each in held:
        if isinstance(each, Tensor):  # a DTensor holds its mesh too
            yield from parts_of(each)
