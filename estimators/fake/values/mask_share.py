"""How much of a tensor a mask selects, where its origin tells: `topk(...).indices == expert` is true for one in so many.

Routing in a mixture of experts, argmax and one-hot masks: an even spread is a better guess than everything at every expert.
Also what follows for single numbers from the guess that each is 1: `i + 1` is 2, `count > 0` is true.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_PICKS = {aten.topk.default: 1, aten.argmax.default: None, aten.argmin.default: None, aten.max.dim: 1,
          aten.min.dim: 1, aten.sort.default: 1, aten.multinomial.default: None}  # fmt: skip
"""Ops whose integer result counts positions along a dimension, by which output holds them."""
KEEPS = frozenset(
    (
        aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default,
        aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
        aten.expand.default, aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default,
        aten.split.Tensor, aten.unbind.int,
    )
)  # fmt: skip
"""Ops whose elements are the first argument's, some or all of them."""


_MOVES: dict[Any, Callable[[int, int], int]] = {
    aten.add.Tensor: operator.add, aten.sub.Tensor: operator.sub, aten.mul.Tensor: operator.mul
}  # fmt: skip
_COMPARES: dict[Any, Callable[[Any, Any], bool]] = {
    aten.gt.Scalar: operator.gt, aten.ge.Scalar: operator.ge, aten.lt.Scalar: operator.lt, aten.le.Scalar: operator.le,
    aten.eq.Scalar: operator.eq, aten.ne.Scalar: operator.ne,
}  # fmt: skip
_EQUAL = frozenset((aten.eq.Scalar, aten.eq.Tensor))
_SCATTERS = frozenset((aten.scatter_.value, aten.scatter.value))
_ANY = frozenset((aten.any.default, aten.any.dim))
_TELLING = _PICKS.keys() | KEEPS | _MOVES.keys() | _COMPARES.keys() | _EQUAL | _SCATTERS | _ANY
"""All of these: looked up once an op, since hashing an operator takes a call."""


def note_share(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Remember on the results of `func` what is known of their range, or of the share of true elements."""
    if func not in _TELLING:
        return
    if func in _MOVES or func in _COMPARES:
        _note_number(func, args, result)
    if func is aten.any.default:
        result._memopt_likely = True
    elif func in _PICKS:
        at = _PICKS[func]
        picked = result if at is None else result[at]
        counted = _counted(func, args)
        if counted is not None:
            picked._memopt_range = counted
    elif func in KEEPS:
        for name in ("_memopt_range", "_memopt_share"):
            known = getattr(args[0], name, None)
            if known is not None:
                for each in result if isinstance(result, (tuple, list)) else (result,):
                    setattr(each, name, known)
    elif func in _EQUAL:
        counted = getattr(args[0], "_memopt_range", None)
        if counted:
            result._memopt_share = 1 / counted
    elif func is aten.any.dim:
        share = getattr(args[0], "_memopt_share", None)
        if share:
            result._memopt_share = min(1.0, share * args[0].shape[args[1]])
    elif func in _SCATTERS:  # one_hot
        counted = getattr(args[2], "_memopt_range", None)
        if counted:
            result._memopt_share = 1 / counted


def _counted(func: Any, args: tuple[Any, ...]) -> int | None:
    """How many positions `func` chooses from."""
    whole = func in (aten.argmax.default, aten.argmin.default)
    at = 2 if func is aten.topk.default else 1 if whole or func in (aten.max.dim, aten.min.dim) else len(args)
    dim = args[at] if len(args) > at else None if whole else -1
    if dim is None:
        return int(args[0].numel())
    return int(args[0].shape[dim]) if args[0].dim() and isinstance(dim, int) else None


def _note_number(func: Any, args: tuple[Any, ...], result: Any) -> None:
    if result.dim() or len(args) != 2 or not isinstance(args[1], (int, float)):
        return
    number = getattr(args[0], "_memopt_number", 1)
    if func in _COMPARES:
        result._memopt_likely = _COMPARES[func](number, args[1])
    elif not result.is_floating_point() and isinstance(args[1], int):
        result._memopt_number = _MOVES[func](number, args[1])


def selected(mask: torch.Tensor) -> int | None:
    """How many elements `mask` selects, if its origin tells."""
    share = getattr(mask, "_memopt_share", None)
    return None if share is None else max(1, round(share * mask.numel()))
