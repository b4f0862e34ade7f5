"""Sparse COO tensors on fake tensors: torch's meta kernels forget how many values there are, and with them the memory.

What a sparse tensor holds are its indices and values, and every op that makes one copies or rearranges both
(ATen/native/sparse/{SparseTensor,SparseTensorMath}.cpp). How many indices are distinct, which `coalesce` needs to know,
is a matter of data: counted where they are known, else as many as there would be among random ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memopt.estimators.fake.kernels.hidden import hidden
from memopt.estimators.fake.torch_internals import FakeTensor

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder

aten = torch.ops.aten
_COPIES = frozenset(
    (
        aten.clone.default, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
        aten.pow.Tensor_Scalar, aten.sqrt.default, aten._to_copy.default, aten.t.default, aten.transpose.int,
    )
)  # fmt: skip
_TURNS = (aten.t.default, aten.transpose.int)


_DISTINCT = "_memopt_distinct"
"""On a sparse tensor made of indices that have values: how many of them are distinct."""


_MADE_OF_TENSORS = (
    "sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor", "sparse_compressed_tensor",
)  # fmt: skip


def install() -> None:
    """Patch what makes sparse tensors: given a device, its C++ asks for a driver before any mode is asked. The parts are moved instead."""
    module: Any = torch
    for name in _MADE_OF_TENSORS:
        setattr(module, name, _without_device(getattr(torch, name)))


def _without_device(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type == "cpu":
            return make(*args, **kwargs | ({} if device is None else {"device": device}))
        shape_apart = {key: value for key, value in kwargs.items() if key not in _PARTS}
        parts = {key: _on(value, device) for key, value in kwargs.items() if key in _PARTS}
        placed = [
            _on(value, device) if not isinstance(value, torch.Size | tuple | int) else value for value in args
        ]
        return make(*placed, **parts, **shape_apart)

    return made


_PARTS = ("indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices", "compressed_indices", "plain_indices")  # fmt: skip


def _on(part: Any, device: Any) -> Any:
    return part.to(device) if isinstance(part, Tensor) else torch.tensor(part, device=device)


def note_distinct(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Count the distinct indices of the sparse tensor that `func` just made, if they are known."""
    if func is aten._sparse_coo_tensor_with_dims_and_tensors.default and not isinstance(args[3], FakeTensor):
        setattr(result, _DISTINCT, torch.unique(args[3], dim=1).shape[1])


def sparse_result(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """What `func` makes of a sparse first argument, with its indices and values; None where torch's own answer will do."""
    first: Any = args[0] if args else None
    if func is aten.sparse_mask.default:
        with recorder.paused(), recorder.fake_mode:
            mask = args[1]
            rows = torch.empty((mask._nnz(), *first.shape[mask.sparse_dim() :]), dtype=first.dtype)
            return _made(mask._indices().clone(), rows, mask.shape, coalesced=True)
    if func is aten._embedding_bag_backward.default and args[9]:  # asked for a sparse gradient
        with recorder.paused(), recorder.fake_mode:
            rows = first.new_empty((args[1].numel(), first.shape[1]))
            indices = torch.empty((1, args[1].numel()), dtype=torch.int64)
            return _made(indices, rows, (args[6], first.shape[1]), coalesced=False)
    if not isinstance(first, Tensor) or first.layout is not torch.sparse_coo:
        return None
    if func is aten._coalesce.default:
        return _coalesced(recorder, first)
    if func not in _COPIES or any(isinstance(x, Tensor) and x.dim() for x in args[1:]):
        return None
    return _copied(recorder, func, first, args, kwargs)


def _copied(
    recorder: Recorder, func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    with recorder.paused(), recorder.fake_mode:
        indices, values = first._indices(), first._values()
        shape = list(first.shape)
        if func in _TURNS:
            one, other = args[1:] or (0, 1)
            shape[one], shape[other] = shape[other], shape[one]
        stolen = (
            func is aten.clone.default and recorder.phase == "backward"
        )  # AccumulateGrad keeps a real one as it is
        if not stolen:
            indices, values = indices.clone(), values.to(kwargs.get("dtype") or values.dtype, copy=True)
        made = _made(indices, values, shape, coalesced=first.is_coalesced() and func not in _TURNS)
    if hasattr(first, _DISTINCT):
        setattr(made, _DISTINCT, getattr(first, _DISTINCT))
    return made


def _coalesced(recorder: Recorder, first: Tensor) -> Tensor:
    """Its storages are as large as before, though fewer of their elements may be in use."""
    nnz = first._nnz()
    distinct = getattr(first, _DISTINCT, None)
    if distinct is None:
        distinct = _random_distinct(math.prod(first.shape[: first.sparse_dim()]), nnz)
        recorder.guesser.remark(
            "of a sparse tensor's indices as many were taken to be distinct as there would be among random ones"
        )
    if recorder.device_of(first) == recorder.target:
        for _ in range(2):  # one number for every index, and their order
            recorder.workspace(nnz * 8, "coalesce")
    with recorder.paused(), recorder.fake_mode:
        indices, values = torch.empty_like(first._indices()), torch.empty_like(first._values())
        return _made(
            indices.narrow(1, 0, distinct), values.narrow(0, 0, distinct), first.shape, coalesced=True
        )


def _random_distinct(places: int, draws: int) -> int:
    """How many of `places` are hit by so many draws, on average."""
    return (
        min(draws, round(-places * math.expm1(draws * math.log1p(-1 / places))))
        if places > 1
        else min(draws, 1)
    )


def _made(indices: Tensor, values: Tensor, shape: Iterable[int], *, coalesced: bool) -> Tensor:
    made = torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False)
    return made._coalesced_(coalesced)


@hidden("cpu", aten.mm.default)
@hidden("cuda", aten.mm.default)
def _sparse_product(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int] | None:
    """ATen/native/sparse/SparseTensorMath.cpp: a product with a sparse matrix is added to zeros."""
    return (result.numel() * result.element_size(),) if args[0].layout is torch.sparse_coo else None
