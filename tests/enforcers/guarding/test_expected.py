"""What shapes tell of an op beforehand is what it makes then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memopt.enforcers.guarding.expected import Expected, _by_shapes
from memopt.instrument.ops import kind_of, tensors_in
from memopt.instrument.torch_internals import TorchDispatchMode

_IMAGE = torch.randn(2, 3, 8, 10, requires_grad=True)
_ROWS, _COLUMN = torch.randn(40, 1), torch.randn(30)
_PLACES = torch.randint(0, 40, (5, 7))


class _Told(TorchDispatchMode):
    """For each op that shapes tell of: what they tell, and what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((*args, *(kwargs or {}).values()))
        told = _by_shapes(kind_of(func).name, func, args, kwargs or {}, given)
        out = func(*args, **(kwargs or {}))
        if told is not None:
            made = [each for each in tensors_in((out,)) if not any(each is other for other in given)]
            self.found[kind_of(func).name] = told, sum(each.nbytes for each in made)
        return out


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: _ROWS + _COLUMN, ["aten.add.Tensor"]),
        (lambda: (_ROWS - _COLUMN).abs().neg(), ["aten.sub.Tensor", "aten.abs.default", "aten.neg.default"]),
        (lambda: _ROWS > _COLUMN, ["aten.gt.Tensor"]),
        (lambda: torch.isfinite(_COLUMN).logical_not(), ["aten.logical_not.default"]),
        (lambda: torch.where(_ROWS > 0, _COLUMN, 0.0), ["aten.where.self"]),
        (lambda: torch.tensor(2.0, dtype=torch.float64) * _COLUMN, ["aten.mul.Tensor"]),
        (lambda: torch.tensor(2.0) * torch.tensor(3.0), ["aten.mul.Tensor"]),
        (lambda: torch.lerp(_COLUMN, _COLUMN, 0.5), ["aten.lerp.Scalar"]),
        (lambda: _ROWS[_PLACES], ["aten.index.Tensor"]),
        (lambda: torch.randn(4, 6, 5)[:, torch.tensor([1, 2, 2])], ["aten.index.Tensor"]),
        (lambda: _ROWS @ _COLUMN[None], ["aten.mm.default"]),
        (
            lambda: F.interpolate(_IMAGE, scale_factor=2.0, mode="bilinear").sum().backward(),
            ["aten.upsample_bilinear2d.default", "aten.upsample_bilinear2d_backward.default"],
        ),
        (lambda: F.interpolate(_IMAGE.detach(), size=(5, 4)), ["aten.upsample_nearest2d.default"]),
        (
            lambda: F.interpolate(_IMAGE.detach(), size=(5, 4), mode="bicubic", antialias=True),
            ["aten._upsample_bicubic2d_aa.default"],
        ),
    ],
)
def test_shapes_tell_what_an_op_makes(call: Callable[[], Any], names: list[str]) -> None:
    with _Told() as told:
        call()
    for name in names:
        expected, made = told.found[name]
        assert expected == made > 0


def test_shapes_tell_no_less_than_an_op_makes() -> None:
    """Of a choice by yes and no as much as there is, of whole numbers with fractions as the larger of both."""
    with _Told() as told:
        _ROWS[_ROWS[:, 0] > 0]
        torch.arange(6) * torch.randn(6)
    for name in ("aten.index.Tensor", "aten.mul.Tensor"):
        expected, made = told.found[name]
        assert expected >= made


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_shapes_tell_nothing_of_ops_that_write_or_make_several() -> None:
    with _Told() as told:
        torch.zeros(3).add_(1)
        torch.frexp(_COLUMN)
    nested = torch.nested.nested_tensor([_COLUMN, _COLUMN[:3]])
    assert not told.found
    multiply = torch.ops.aten.mul.Tensor
    assert _by_shapes("aten.mul.Tensor", multiply, (nested, nested), {}, [nested, nested]) is None


def test_fractions_of_a_factory_that_tell_no_size_make_no_new_call() -> None:
    expected = Expected()

    def key(func: Any, *given: Any) -> Any:
        return expected.of(kind_of(func).name, func, given, {}).key

    assert key(torch.ops.aten.linspace.default, 0.1, 0.9, 5) == key(
        torch.ops.aten.linspace.default, 0.2, 0.7, 5
    )
    assert key(torch.ops.aten.linspace.default, 0.1, 0.9, 5) != key(
        torch.ops.aten.linspace.default, 0.1, 0.9, 6
    )
    assert key(torch.ops.aten.full.default, [3], 1.5) != key(torch.ops.aten.full.default, [3], 1)
    arange = torch.ops.aten.arange.start_step
    assert key(arange, 0.0, 2.0, 0.1) != key(arange, 0.0, 2.0, 0.2)
