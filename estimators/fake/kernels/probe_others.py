"""Temporaries inside any other CPU kernel: ask it once, with fewer rows (see `fake/kernels/probe.py`).

Asked are operators of aten that change nothing, are neither views nor pointwise and take plain tensors; matrix products only in
half precision, where oneDNN packs, and where a factor is copied first. Rows are the first dimension, in every argument that has as many
as the first one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from memopt.estimators.fake.kernels.probe import Call, Spec, few

_LEAST_BYTES = 32 << 10
_MOST_BYTES = 48 << 20
_MOST_FLOPS = 4e9
_CHEAP_FLOPS = 1 << 30
_CHEAP_BYTES = 16 << 20
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_HALF = (torch.float16, torch.bfloat16)
_NEVER = ("aten::convolution", "aten::mkldnn_rnn", "aten::_to_copy", "aten::clone", "aten::embedding_dense_backward",
          "aten::cat", "aten::stack", "aten::select_backward", "aten::slice_backward", "aten::_efficientzerotensor", "aten::multinomial")  # fmt: skip


def ask_any(recorder: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Let `recorder` ask what `func` takes inside, if it may take something worth knowing."""
    if not _may_hide(func):
        return
    given = (*args, *kwargs.values())
    tensors = [a for a in given if isinstance(a, torch.Tensor)]
    if not tensors or not tensors[0].dim() or any(isinstance(a, torch.Generator) for a in given):
        return
    biggest = max(t.numel() * t.element_size() for t in tensors)
    if biggest < _LEAST_BYTES or any(t.layout is not torch.strided for t in tensors):
        return
    name = func._schema.name
    if name in _PRODUCTS and not (_packed(tensors) or _copied(tensors)):
        return
    rows = tensors[0].shape[0]
    cheap = _cheap(tensors) if name in _PRODUCTS else 0
    specs = [_spec(a) for a in args]
    named = {k: _spec(a) for k, a in kwargs.items()}
    if (
        _scaled_bytes([*specs, *named.values()], rows, max(few(rows, cheap))) > _MOST_BYTES
        or _fixed_bytes(given, result, rows) > _MOST_BYTES
    ):
        return

    def make(batch: int) -> Call:
        def zeros(value: Any) -> Any:
            if isinstance(value, list):
                return [zeros(each) for each in value]
            if not isinstance(value, Spec):
                return value
            return value.zeros(0 if _has_rows(value.shape, value.dtype, rows) else None, batch)

        inputs, extra = [zeros(s) for s in specs], {k: zeros(v) for k, v in named.items()}

        def call() -> Any:
            made = func(*inputs, **extra)
            return made if isinstance(made, (tuple, list)) else (made,)

        return call

    key = (func, *(_key(s) for s in specs), *((k, _key(v)) for k, v in named.items()))
    probe = recorder.probes.add(key, make, rows, cheap)
    probe.workspaces.append(recorder.workspace_later(func.__name__))
    if not _factorises(func):
        probe.outputs += recorder.born_now(result)


@cache
def _may_hide(func: Any) -> bool:
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable or schema.name.startswith(_NEVER):
        return False
    if torch.Tag.pointwise in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if torch.Tag.inplace_view in func.tags or any(r.alias_info is not None for r in schema.returns):
        return False
    return bool(schema.returns)


def _factorises(func: Any) -> bool:
    """Whether `func` is of linear algebra: its outputs have the sizes that fake tensors know, the shorter side's among them, so
    that they do not follow the rows in a line."""
    return bool(func._schema.name.startswith(("aten::_linalg", "aten::linalg")))


def _has_rows(shape: tuple[int, ...], dtype: torch.dtype, rows: int) -> bool:
    """Whether the first dimension is the batch. A vector of floats is channels that only happen to be as many:

    cut short, a batch norm's kernel would write past its end.
    """
    return bool(shape) and shape[0] == rows and not (len(shape) == 1 and dtype.is_floating_point)


def _packed(tensors: list[torch.Tensor]) -> bool:
    left, right = tensors[-2], tensors[-1]
    if left.dtype not in _HALF:
        return False
    return 2.0 * 32 * left.shape[-1] * right.numel() / max(1, right.shape[-2]) < _MOST_FLOPS


def _copied(tensors: list[torch.Tensor]) -> bool:
    """Does a product copy one of its factors first? ATen/native/LinearAlgebra.cpp does so where BLAS cannot take it as it lies: a gradient
    that `sum` or `mean` has spread, every second column."""
    return any(each.dim() >= 2 and not _is_for_blas(each) for each in tensors[-2:])


def _is_for_blas(matrix: torch.Tensor) -> bool:
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _cheap(tensors: list[torch.Tensor]) -> int:
    """The rows that a product may have and take some tens of milliseconds: how it blocks depends on them, not in a line."""
    left, right = tensors[-2], tensors[-1]
    columns = right.shape[-1]
    flops = 2 * left[0].numel() * columns
    return min(
        _CHEAP_FLOPS // max(1, flops), _CHEAP_BYTES // max(1, (left[0].numel() + columns) * left.itemsize)
    )


def _scaled_bytes(values: list[Any], rows: int, few: int) -> int:
    total = 0
    for value in values:
        if isinstance(value, Spec):
            number = torch.Size(value.shape).numel() * value.dtype.itemsize
            total += number * few // rows if _has_rows(value.shape, value.dtype, rows) else number
    return total


def _fixed_bytes(given: tuple[Any, ...], result: Any, rows: int) -> int:
    """Bytes of outputs that do not shrink with the rows."""
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    return sum(
        t.numel() * t.element_size()
        for t in outputs
        if isinstance(t, torch.Tensor) and (not t.dim() or t.shape[0] != rows)
    )


def _spec(value: Any) -> Any:
    """Without the tensors: a question that held them would keep them alive."""
    if isinstance(value, (list, tuple)):
        return [_spec(each) for each in value]
    return Spec(value) if isinstance(value, torch.Tensor) else value


def _key(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_key, value))
    return value.key if isinstance(value, Spec) else repr(value)
