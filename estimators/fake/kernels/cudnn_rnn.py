"""cuDNN's recurrent layers: one kernel for the whole sequence, where the CPU runs step by step or by oneDNN.

`aten::lstm`, `gru`, `rnn_tanh` and `rnn_relu` give the outputs, the reserve space that backward reads, and a workspace while either
pass runs (ATen/native/cudnn/RNN.cpp). Backward writes every weight's gradient into one buffer. The reserve's layout is not
published: what backward needs of every step are the gates, the cell state (of a GRU the candidate's recurrent part) and the layer's
output, which makes 6, 5 and 2 values a unit for LSTM, GRU and plain cells (MIOpen's open source keeps 6, 4 and 1); the factors and
their range lie in `data/hidden_memory.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memopt.estimators.hidden.hidden_memory import built_in_rows

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder
    from memopt.estimators.fake.values.choices import Overrides

aten = torch.ops.aten
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True, slots=True)
class _Layers:
    recorder: Recorder
    kind: str
    layers: int
    directions: int
    dropout: float
    train: bool
    batch_first: bool
    batch_sizes: Tensor | None

    def steps_times_batch(self, input: Tensor) -> int:
        return input.shape[0] if self.batch_sizes is not None else input.shape[0] * input.shape[1]

    def batch(self, input: Tensor) -> int:
        if self.batch_sizes is not None:
            return int(self.batch_sizes[0])
        return input.shape[0 if self.batch_first else 1]

    def reserve_bytes(self, input: Tensor, hidden: int) -> int:
        """What the forward pass keeps for the backward one."""
        values = self.steps_times_batch(input) * hidden * self.directions
        kept = round(values * self.layers * _kept_values(self.kind)) * input.element_size()
        masks = values * (self.layers - 1) if self.dropout else 0
        return kept + masks if self.train else 0

    def workspace_bytes(self, input: Tensor, hidden: int) -> int:
        """The gates of one layer at every step: the product with its input, before the recurrence."""
        values = self.steps_times_batch(input) * hidden * self.directions * _GATES[self.kind]
        return values * input.element_size()


def _kept_values(kind: str) -> float:
    name = f"cudnn_rnn_reserve_{kind.partition('_')[0]}"
    return next(row.value for row in built_in_rows() if row.name == name)


class _Cudnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: _Layers, input: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, out_size = weights[1].shape[0] // _GATES[how.kind], hx.shape[-1]
        output = input.new_empty((*input.shape[:-1], out_size * how.directions))
        hy = input.new_empty(hx.shape)
        cy = input.new_empty(hx.shape if cx is None else cx.shape)
        ctx.reserve = input.new_empty(how.reserve_bytes(input, hidden), dtype=torch.uint8)
        _work(how, input, hidden)
        ctx.how, ctx.hidden = how, hidden
        ctx.save_for_backward(input, hx, cx, output, *weights)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        input, hx, cx, _, *weights = ctx.saved_tensors
        dx, dhx = torch.empty_like(input), torch.empty_like(hx)
        dcx = None if cx is None else torch.empty_like(cx)
        flat = weights[0].new_empty(sum(w.numel() for w in weights))
        _work(ctx.how, input, ctx.hidden)
        parts = flat.split([w.numel() for w in weights])
        return None, dx, dhx, dcx, *(p.view(w.shape) for p, w in zip(parts, weights, strict=True))


def _work(how: _Layers, input: Tensor, hidden: int) -> None:
    if how.recorder.device_of(input) == "cuda":
        how.recorder.workspace(how.workspace_bytes(input, hidden), "cuDNN recurrent layer")


def recurrent_choices(overrides: Overrides, recorder: Recorder) -> None:
    """Recurrent layers on the pretended GPU run by cuDNN."""
    for kind in _GATES:
        overrides.add(f"{kind}.input", _padded(recorder, kind))
        overrides.add(f"{kind}.data", _packed(recorder, kind))


def _padded(recorder: Recorder, kind: str) -> Any:
    def run(
        input: Tensor, hx: Any, params: list[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        how = _Layers(recorder, kind, num_layers, 1 + bidirectional, dropout, train, batch_first, None)
        return _run(how, input, hx, params)

    return run


def _packed(recorder: Recorder, kind: str) -> Any:
    def run(
        data: Tensor, batch_sizes: Tensor, hx: Any, params: list[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        how = _Layers(recorder, kind, num_layers, 1 + bidirectional, dropout, train, False, batch_sizes)
        return _run(how, data, hx, params)

    return run


def _run(how: _Layers, input: Tensor, hx: Any, params: list[Tensor]) -> Any:
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    if torch.is_autocast_enabled("cpu") and input.dtype is torch.float32:  # the key that stands for CUDA's
        dtype = torch.get_autocast_dtype("cpu")
        input, states, params = (
            input.to(dtype),
            [s.to(dtype) for s in states],
            [p.to(dtype) for p in params],
        )
    if how.recorder.device_of(input) == "cuda":
        how.recorder.guesser.remark(
            "recurrent layers were taken to run by cuDNN; its reserve space is a formula with an error of up to a fifth"
            + (", and the states of its dropout are not counted" if how.dropout and how.train else "")
        )
    output, hy, cy = _Cudnn.apply(how, input, states[0], states[1] if len(states) > 1 else None, *params)  # type: ignore[no-untyped-call]
    return (output, hy, cy) if how.kind == "lstm" else (output, hy)
