"""`LSTMCell` and `GRUCell` on CUDA: one fused kernel after the two matrix products, where the CPU computes gate by gate.

ATen/native/RNN.cpp chooses `_thnn_fused_{lstm,gru}_cell`; ATen/native/cuda/RNN.cu tells what they take, derivatives.yaml what is
saved: the products, the biases, the cell (of a GRU the hidden) state and a workspace of 4 (of a GRU 5) values a unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder
    from memopt.estimators.fake.values.choices import Overrides

aten = torch.ops.aten
_GRU_WORKSPACE = 5


class _LstmCell(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        workspace = torch.empty_like(input_gates)
        hy, cy = torch.empty_like(cx), torch.empty_like(cx)
        ctx.save_for_backward(input_gates, hidden_gates, cx, cy, workspace, *biases)
        return hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, cx, _, workspace, bias, _ = ctx.saved_tensors
        gates, grad_cx = torch.empty_like(workspace), torch.empty_like(cx)
        grad_bias = None if bias is None else gates.sum(0)
        return gates, gates, grad_cx, grad_bias, grad_bias


class _GruCell(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Tensor | None
    ) -> Tensor:
        workspace = hx.new_empty((hx.shape[0], hx.shape[1] * _GRU_WORKSPACE))
        hy = torch.empty_like(hx)
        ctx.save_for_backward(input_gates, hidden_gates, hx, workspace, *biases)
        return hy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_gates, hidden_gates, hx, _, *biases = ctx.saved_tensors
        gates = torch.empty_like(input_gates), torch.empty_like(hidden_gates)
        grad_hx = torch.empty_like(hx)
        return (
            *gates,
            grad_hx,
            *(None if b is None else g.sum(0) for g, b in zip(gates, biases, strict=True)),
        )


def cell_choices(overrides: Overrides, recorder: Recorder) -> None:
    """Cells on the pretended GPU run fused; those on the host as the CPU runs them."""

    def lstm(
        input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor,
        b_ih: Tensor | None = None, b_hh: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if recorder.device_of(input) != "cuda":
            gates = _linear(hx[0], w_hh, b_hh).add_(_linear(input, w_ih, b_ih))
            i, f, g, o = gates.unsafe_chunk(4, 1)
            cy = f.sigmoid_() * hx[1] + i.sigmoid_() * g.tanh_()
            return o.sigmoid_() * cy.tanh(), cy
        return _LstmCell.apply(*_products(input, hx[0], w_ih, w_hh), hx[1], b_ih, b_hh)  # type: ignore[no-any-return, no-untyped-call]

    def gru(
        input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor,
        b_ih: Tensor | None = None, b_hh: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if recorder.device_of(input) != "cuda":
            r, z, n = _linear(input, w_ih, b_ih).unsafe_chunk(3, 1)
            hr, hz, hn = _linear(hx, w_hh, b_hh).unsafe_chunk(3, 1)
            new = hr.add_(r).sigmoid_().mul(hn).add_(n).tanh_()
            return (hx - new).mul_(hz.add_(z).sigmoid_()).add_(new)
        return _GruCell.apply(*_products(input, hx, w_ih, w_hh), hx, b_ih, b_hh)  # type: ignore[no-any-return, no-untyped-call]

    overrides.add("lstm_cell", lstm)
    overrides.add("gru_cell", gru)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return aten.linear.default(input, weight, bias)  # type: ignore[no-any-return]


def _products(input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor]:
    return torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
