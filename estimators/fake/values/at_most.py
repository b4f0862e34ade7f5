"""What a mask can select at most: a known mask and'ed with it, or infinities written where nothing is to be found.

Miners of pairs write infinity over the pairs of other labels, sort the distances and compare; filters multiply a threshold by what
labels allow. Labels are known where distances are not, so that the result is bounded far below "everything".
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memopt.estimators.fake.kernels.indexing import is_mask
from memopt.estimators.fake.torch_internals import FakeTensor
from memopt.estimators.fake.values.mask_share import KEEPS, selected

aten = torch.ops.aten

_ANDS = frozenset((aten.bitwise_and.Tensor, aten.bitwise_and_.Tensor, aten.logical_and.default, aten.logical_and_.default,
                   aten.mul.Tensor))  # fmt: skip
_FILLS = frozenset((aten.index_put_.default, aten.index_put.default, aten.masked_fill.Scalar, aten.masked_fill_.Scalar,
                    aten.masked_fill.Tensor, aten.masked_fill_.Tensor))  # fmt: skip
_MOVES = frozenset((aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor))
_FALSE_FOR: dict[Any, float] = {
    aten.gt.Tensor: -math.inf, aten.ge.Tensor: -math.inf, aten.lt.Tensor: math.inf, aten.le.Tensor: math.inf,
    aten.gt.Scalar: -math.inf, aten.ge.Scalar: -math.inf, aten.lt.Scalar: math.inf, aten.le.Scalar: math.inf,
}  # fmt: skip
"""Comparisons, and the first operand for which each is false whatever the second one is, but the same infinity."""
_FAR = 1e9
"""From here on a number stands for infinity; in half precision, which ends before, its largest one does."""
_SORTS = frozenset((aten.sort.default, aten.sort.stable))
_TELLING = _ANDS | _FILLS | _MOVES | _SORTS | KEEPS | _FALSE_FOR.keys()
"""All of these: looked up once an op, since hashing an operator takes a call."""


def note_most(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Remember on the results of `func` what share of them is infinite, or can be true."""
    if func not in _TELLING:
        if args and result is args[0]:
            _forget(result)
    elif func in _FILLS:
        _note_filled(func, args, result)
    elif func in _ANDS:
        _note_and(args, result)
    elif func in _FALSE_FOR:
        value, share = getattr(args[0], "_memopt_infinite", (0.0, 0.0))
        if value == _FALSE_FOR[func]:
            result._memopt_most = 1 - share
    else:
        _keep(func, args, result)


def most(mask: torch.Tensor) -> int | None:
    """How many elements `mask` selects at most, if that is known."""
    share = getattr(mask, "_memopt_most", None)
    return None if share is None else round(share * mask.numel())


def _keep(func: Any, args: tuple[Any, ...], result: Any) -> None:
    first = result[:1] if func in _SORTS else result if isinstance(result, (tuple, list)) else (result,)
    for name in ("_memopt_infinite", "_memopt_most"):
        known = getattr(args[0], name, None)
        if known is not None and (func not in _MOVES or name == "_memopt_infinite"):
            for each in first:
                setattr(each, name, known)


def _forget(tensor: torch.Tensor) -> None:
    """What was known of values that are written over is known no more."""
    for name in ("_memopt_infinite", "_memopt_most"):
        if hasattr(tensor, name):
            delattr(tensor, name)


def _note_and(args: tuple[Any, ...], result: Any) -> None:
    bounds = [_most_of(each) for each in args[:2]] if result.dtype is torch.bool else []
    known = [each for each in bounds if each is not None]
    if known:
        result._memopt_most = min(known)


def _most_of(mask: Any) -> float | None:
    if not isinstance(mask, torch.Tensor) or isinstance(mask, FakeTensor):
        return getattr(mask, "_memopt_most", None)
    return float(mask.float().mean()) if mask.numel() else None


def _note_filled(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """An infinity written where an index or a mask says: `x[rows, columns] = inf`, `x.masked_fill(mask, inf)`."""
    value = _infinity(args[0], args[2])
    share = _share(args[0], args[1]) if value else 0.0
    before, covered = getattr(args[0], "_memopt_infinite", (value, 0.0))
    if share or covered:
        result._memopt_infinite = (value, max(share, covered)) if value == before else (before, covered)


def _infinity(tensor: torch.Tensor, value: Any) -> float:
    """`inf` or `-inf` for a value that no other of `tensor` comes near; 0 for all else."""
    if isinstance(value, torch.Tensor):
        value = 0.0 if isinstance(value, FakeTensor) or value.numel() != 1 else value.item()
    if not tensor.is_floating_point() or abs(value) < min(_FAR, torch.finfo(tensor.dtype).max):
        return 0.0
    return math.copysign(math.inf, value)


def _share(tensor: torch.Tensor, where: Any) -> float:
    """Which share of `tensor` a mask, or indices that are known, say."""
    if isinstance(where, torch.Tensor):
        return (
            _most_of(where) or 0.0
            if not isinstance(where, FakeTensor)
            else (selected(where) or 0) / where.numel()
        )
    known = [each for each in where if each is not None]
    if any(isinstance(each, FakeTensor) for each in known) or any(map(is_mask, known)):
        return 0.0
    touched = torch.zeros(tuple(tensor.shape), dtype=torch.bool)
    touched[tuple(slice(None) if each is None else each for each in where)] = True
    return float(touched.float().mean())
