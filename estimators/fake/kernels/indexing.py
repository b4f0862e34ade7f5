"""Indexing by masks and positions: what its kernels hold beside the result.

ATen/native/TensorAdvancedIndexing.cpp: a mask becomes positions first, eight bytes a dimension and element chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memopt.estimators.fake.kernels.hidden import hidden
from memopt.estimators.fake.torch_internals import FakeTensor

aten = torch.ops.aten
_POSITION = 8
_SORTED_POSITIONS = 6
"""ATen/native/cuda/Indexing.cu, `index_put_with_sort_kernel`: linear, sorted and original indices, a range, and what CUB's
radix sort of pairs takes, once the keys and the values again."""


def is_mask(index: torch.Tensor | None) -> bool:
    """Whether an index chooses by truth, not by position."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@hidden("cpu", aten.index.Tensor)
@hidden("cuda", aten.index.Tensor)
def _index(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int] | None:
    return (_mask_bytes(recorder, args[1]),) if _masked(args[1]) else None


@hidden("cpu", aten.index_put.default, aten.index_put_.default)
def _put(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int] | None:
    if not _masked(args[1]):
        return None
    return () if fills(args, kwargs) else (_mask_bytes(recorder, args[1]),)


@hidden("cuda", aten.index_put.default, aten.index_put_.default)
def _put_sorted(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    if not _accumulates(args, kwargs):
        return _put(recorder, args, kwargs, result) or ()
    counts = [_count(recorder, each) for each in args[1] if each is not None]
    return (_SORTED_POSITIONS * _POSITION * max(counts, default=0),)


def _accumulates(args: Any, kwargs: Any) -> bool:
    return bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))


def _masked(indices: Any) -> bool:
    return any(map(is_mask, indices))


def fills(args: Any, kwargs: Any) -> bool:
    """`canDispatchToMaskedFill`: one number written where a single mask is true."""
    single = sum(each is not None for each in args[1]) == 1
    return single and args[2].numel() == 1 and not _accumulates(args, kwargs)


def _mask_bytes(recorder: Any, indices: Any) -> int:
    masks = [each for each in indices if is_mask(each)]
    return sum(_count(recorder, mask) * mask.dim() * _POSITION for mask in masks)


def _count(recorder: Any, index: torch.Tensor) -> int:
    """How many elements `index` chooses."""
    if not is_mask(index):
        return index.numel()
    if isinstance(index, FakeTensor):
        return int(recorder.guesser.selected(index))
    return int(index.count_nonzero())
