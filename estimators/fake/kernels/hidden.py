"""Memory that kernels take inside themselves, op by op: a registry of formulas, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder

aten = torch.ops.aten
Formula = Callable[..., Iterable[int] | None]
_FORMULAS: dict[tuple[str, Any], Formula] = {}


def hidden(target: str, *ops: Any) -> Callable[[Formula], Formula]:
    """Register a formula for `ops` on `target`: (recorder, args, kwargs, result) -> bytes taken one after another.

    None: the call is not of the kind that the formula knows.
    """

    def register(formula: Formula) -> Formula:
        for op in ops:
            _FORMULAS[target, op] = formula
        return formula

    return register


def hidden_bytes(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterable[int]:
    """Bytes that `func` takes and gives back while it runs, beside its outputs."""
    formula = _FORMULAS.get((recorder.target, func))
    known = formula(recorder, args, kwargs, result) if formula is not None else None
    if known is not None:
        return known
    if recorder.target == "cpu":
        from memopt.estimators.fake.kernels.probe_others import ask_any

        ask_any(recorder, func, args, kwargs, result)
    return ()


def _of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


@hidden("cpu", aten._safe_softmax.default)
@hidden("cuda", aten._safe_softmax.default)
def _safe_softmax(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    """ATen/native/transformers/attention.cpp: which elements are -inf, and which rows wholly; one byte each."""
    return (result.numel() + result.numel() // max(1, result.shape[-1]),)


@hidden("cpu", aten.embedding_dense_backward.default)
def _embedding_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    """ATen/native/Embedding.cpp: `grad.contiguous()` first."""
    return () if args[0].is_contiguous() else (_of(args[0]),)


@hidden(
    "cpu",
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
@hidden(
    "cuda",
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
def _reduced_in_place(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    """ATen/native/{BinaryOps,Loss}.cpp: the scalar is the elementwise result resized, so it keeps the whole storage."""
    if result.dim() == 0:
        whole = torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * result.element_size()
        recorder.rows[recorder.index_of(result)].size_bytes = whole
        if recorder.target == "cpu":
            return (whole,)
    return ()


@hidden("cpu", aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
@hidden("cuda", aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def _ctc_backward(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    """ATen/native/LossCTC.cpp: the backward probabilities, as many as the forward ones that were saved."""
    return (_of(args[6]),)
