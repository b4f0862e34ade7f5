"""In-place opportunities: an elementwise op whose input dies with it could write its result there."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.estimators.simulator.trace_view import TraceView

ELEMENTWISE = frozenset((
    "relu", "gelu", "silu", "sigmoid", "tanh", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "softplus", "clamp",
    "clamp_min", "clamp_max", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "pow", "reciprocal", "add", "sub", "rsub", "mul", "div",
    "where", "masked_fill", "threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward",
    "hardtanh_backward", "hardswish_backward", "leaky_relu_backward", "elu_backward", "softplus_backward",
    "_softmax_backward_data", "_log_softmax_backward_data", "native_dropout_backward", "masked_fill_",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class InPlace:
    """Ops that could write into a dying input, and what the peak of live bytes would be if all did."""

    ops: int
    bytes_each_step: int
    peak_bytes: int


def in_place(view: TraceView) -> InPlace:
    """What would be saved. A storage that autograd or the script still holds does not die with the op, so it is not counted."""
    high = view.high.copy()
    ops = total = 0
    for op in range(view.n):
        size = _shareable(view, op)
        if size:
            ops += 1
            total += size
            high[op] -= size
    return InPlace(ops, total, int(high.max(initial=0)))


def _shareable(view: TraceView, op: int) -> int:
    name = view.trace.op_name(op).split(".")
    if len(name) < 2 or name[1] not in ELEMENTWISE:
        return 0
    made = [s for s in {view.value_storage[v] for v in view.writes[op]} if view.birth[s] == op]
    dying = [
        s
        for s in {view.value_storage[v] for v in view.reads[op]}
        if view.death[s] == op and view.birth[s] >= 0
    ]
    sizes = sorted((int(view.size[s]) for s in made), reverse=True)
    return next((size for size in sizes if any(int(view.size[s]) == size for s in dying)), 0)
