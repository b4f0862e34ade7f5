"""Megatron's closed forms for transformers, as a cross-check of a recorded iteration that is one.

Formulas, for L layers of width h with a heads, feed-forward width f, vocabulary V, sequences s x batch b, e bytes an element:
  - parameters of the layers (Narayanan et al. 2021, arXiv 2104.04473, sec. 5.1, with f for 4h): L (4 h^2 + 2 h f + 9 h + f), and
    h for each row of the tables (V; positions; V again where the head is not tied to the embedding);
  - FLOPs of forward: L (8 b s h^2 + 4 b s h f + 4 b s^2 h), and 2 b s h V for the logits; backward twice that;
  - activations that a layer saves (Korthikanti et al. 2022, arXiv 2205.05198, sec. 4.1): s b (h (8 e + 2) + 2 e f), and
    a s^2 b (2 e + 1) where attention is not fused: 34 s b h and 5 a s^2 b at two bytes and f = 4h, dropout's masks among them.
O(ops). The numbers are read off the shapes in the profile (attention gives a and L, layer norm b, s and h). It plans nothing:
where trace and formula differ, one of them does not know something (gated or grouped layers, no dropout, casts, what autograd
saves twice).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from memopt.advisors.counsel.counsel import Advice
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.registry import counsel
from memopt.errors import NotPossibleHere
from memopt.estimators.elsewhere.batch import label_shape
from memopt.estimators.elsewhere.op_shapes import op_call, tensor_of
from memopt.estimators.elsewhere.op_time import ITEM_BYTES, op_flops
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import CATEGORIES
from memopt.units import format_bytes

_FUSED = "scaled_dot_product"
_NORMS = ("native_layer_norm", "_fused_rms_norm", "rms_norm")


@dataclass(frozen=True, slots=True)
class Transformer:
    """The numbers of the formulas."""

    layers: int
    width: int
    heads: int
    feed_forward: int
    vocabulary: int
    table_rows: int
    """Of all embeddings, and of a head of its own."""
    length: int
    batch: int
    item_bytes: int
    fused: bool
    """Attention never holds the s x s scores."""
    dropout: bool

    @property
    def layer_parameters(self) -> int:
        h, f = self.width, self.feed_forward
        return self.layers * (4 * h * h + 2 * h * f + 9 * h + f)

    @property
    def forward_flops(self) -> float:
        tokens, h = self.batch * self.length, self.width
        layer = 8 * tokens * h * h + 4 * tokens * h * self.feed_forward + 4 * tokens * self.length * h
        return float(self.layers * layer + 2 * tokens * h * self.vocabulary)

    @property
    def activation_bytes(self) -> int:
        """Saved by the layers for backward."""
        e, mask = self.item_bytes, int(self.dropout)
        tokens = self.batch * self.length
        linear = tokens * (self.width * (8 * e + 2 * mask) + 2 * e * self.feed_forward)
        scores = self.heads * self.length**2 * self.batch * ((1 + mask) * e + mask)
        return self.layers * (linear + (0 if self.fused else scores))

    @property
    def mask_bytes(self) -> int:
        """Of those, what dropout saves at one byte an element."""
        scores = 0 if self.fused else self.heads * self.length
        return int(self.dropout) * self.layers * self.batch * self.length * (2 * self.width + scores)


@counsel
class Megatron:
    name = "megatron"
    paper = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training; Korthikanti et al. 2022, Reducing Activation Recomputation"
    needs = "a transformer; it checks a profile against closed forms and plans nothing"
    allows: frozenset[str] = frozenset()
    not_on_graphs = "it reckons from the shapes of a transformer"
    enforced = False

    def study(self, problem: Problem, allow: frozenset[str], /) -> Advice:
        view = problem.view
        found = transformer_of(view)
        traced = traced_figures(view)
        pairs = (
            ("parameters", float(found.layer_parameters + found.table_rows * found.width), traced["parameters"], _count),
            ("forward FLOPs", found.forward_flops, traced["forward_flops"], _count),
            ("saved by the layers", float(found.activation_bytes), traced["saved_bytes"], _bytes),
            ("of it for dropout", float(found.mask_bytes), traced["mask_bytes"], _bytes),
        )  # fmt: skip
        rows = [
            (
                "shape",
                f"{found.layers} layers of width {found.width}, {found.heads} heads, feed-forward {found.feed_forward}, vocabulary {found.vocabulary}, "
                f"batch {found.batch} x {found.length}, {found.item_bytes} bytes an element, {'fused' if found.fused else 'plain'} attention"
                f"{', dropout' if found.dropout else ''}",
            )
        ]
        figures: dict[str, float | int | str] = {}
        worst = ("", 0.0)
        for name, closed, measured, words in pairs:
            off = measured / closed - 1 if closed else 0.0
            rows.append((name, f"{words(closed)} by formula, {words(measured)} in the trace ({off:+.1%})"))
            figures |= {f"{name}: formula": closed, f"{name}: trace": measured}
            if name == "of it for dropout":
                continue
            worst = max(worst, (name, off), key=lambda pair: abs(pair[1]))
        return Advice(
            strategy=self.name,
            verdict=f"The trace is a transformer. Furthest from the closed forms: {worst[0]} ({worst[1]:+.1%})."
            if worst[0]
            else "The trace is a transformer and agrees with the closed forms.",
            rows=tuple(rows),
            figures=figures,
            peak_bytes=problem.unplanned_peak_bytes,
            notes=("a cross-check: it plans nothing",),
        )


def transformer_of(view: TraceView) -> Transformer:
    """The numbers of the formulas, from the shapes of the trace. Raises `NotPossibleHere` when it is no transformer."""
    fused = _forward_ops(view, lambda name: _FUSED in name)
    plain = [op for op in _forward_ops(view, lambda name: "softmax" in name and "log" not in name)
             if len(_out_shape(view, op)) in (3, 4) and len(set(_out_shape(view, op)[-2:])) == 1]  # fmt: skip
    attention = fused or plain
    norms = [_out_shape(view, op) for op in _forward_ops(view, lambda name: name in _NORMS)]
    wide = Counter(shape for shape in norms if len(shape) == 3).most_common(1)
    if not attention or not wide:
        raise NotPossibleHere(
            "this profile is not of a transformer that the closed forms know",
            why="they need attention over sequences and layer norms of (batch, length, width)",
        )
    batch, length, width = wide[0][0]
    scores = _out_shape(view, attention[0])
    heads = scores[1] if len(scores) == 4 else max(1, scores[0] // max(1, batch))
    norm_op = _forward_ops(view, lambda name: name in _NORMS)[0]
    return Transformer(
        layers=len(attention),
        width=width,
        heads=heads,
        feed_forward=_feed_forward(view, width),
        vocabulary=max(_tables(view, width), default=0),
        table_rows=_table_rows(view, width),
        length=length,
        batch=batch,
        item_bytes=_item_bytes(view, norm_op),
        fused=bool(fused),
        dropout=bool(_forward_ops(view, lambda name: "dropout" in name or name == "bernoulli_")),
    )


def traced_figures(view: TraceView) -> dict[str, float]:
    """Parameters, FLOPs of forward and bytes that autograd saved, as recorded."""
    trace = view.trace
    kind = CATEGORIES.index("parameter")
    held = [s for s, each in enumerate(trace.storages.category) if each == kind]
    vocabulary = _logit_width(view)
    saved = [
        s
        for s in view.saved.values()
        if (label_shape(trace.storage_label(s.storage)) or (0,))[-1] != vocabulary
    ]
    return {
        "parameters": float(sum(tensor_of(trace, s).elements for s in held)),
        "forward_flops": sum(op_flops(op_call(trace, op)) for op in range(view.n) if view.phase[op] == 0),
        "saved_bytes": float(sum(s.size_bytes for s in saved)),
        "mask_bytes": float(sum(s.size_bytes for s in saved if _is_mask(view, s.storage))),
    }


def _is_mask(view: TraceView, storage: int) -> bool:
    """Was it drawn (`bernoulli_`), or is it the mask of a dropout?"""
    names = {view.trace.op_name(op).split(".")[1] for op, _ in view.value_times[storage] if op >= 0}
    if "native_dropout" in names:
        return "bool" in view.trace.storage_label(storage)
    return "bernoulli_" in names


def _forward_ops(view: TraceView, wanted: Callable[[str], bool]) -> list[int]:
    names = ((op, view.trace.op_name(op).split(".")) for op in range(view.n) if view.phase[op] == 0)
    return [op for op, name in names if len(name) > 1 and wanted(name[1])]


def _out_shape(view: TraceView, op: int) -> tuple[int, ...]:
    shapes = [label_shape(view.trace.storage_label(view.value_storage[v])) or () for v in view.writes[op]]
    return shapes[0] if shapes else ()


def _item_bytes(view: TraceView, op: int) -> int:
    return ITEM_BYTES.get(tensor_of(view.trace, view.value_storage[view.writes[op][0]]).dtype, 4)


def _parameters(view: TraceView) -> list[tuple[int, ...]]:
    kind = CATEGORIES.index("parameter")
    rows = (s for s, each in enumerate(view.trace.storages.category) if each == kind)
    return [label_shape(view.trace.storage_label(s)) or () for s in rows]


def _tables(view: TraceView, width: int) -> list[int]:
    """Rows of each table of the model's width that an embedding reads."""
    read = {
        view.value_storage[value]
        for op in _forward_ops(view, lambda name: name == "embedding")
        for value in view.reads[op]
    }
    shapes = [label_shape(view.trace.storage_label(s)) or () for s in sorted(read)]
    return [shape[0] for shape in shapes if len(shape) == 2 and shape[1] == width]


def _table_rows(view: TraceView, width: int) -> int:
    tables = _tables(view, width)
    vocabulary = max(tables, default=0)
    own_head = sum(shape == (vocabulary, width) for shape in _parameters(view)) > tables.count(vocabulary)
    return sum(tables) + (vocabulary if own_head and _logit_width(view) == vocabulary else 0)


def _logit_width(view: TraceView) -> int:
    shapes = [_out_shape(view, op) for op in _forward_ops(view, lambda name: "log_softmax" in name)]
    return shapes[-1][-1] if shapes and shapes[-1] else -1


def _feed_forward(view: TraceView, width: int) -> int:
    """The other side of the most common matrix that widens, embeddings and head left out; four widths without one."""
    sides = Counter(
        max(shape)
        for shape in _parameters(view)
        if len(shape) == 2 and width in shape and max(shape) not in (width, 3 * width)
    )
    sides.subtract(_tables(view, width))
    if _logit_width(view) in sides:
        sides[_logit_width(view)] -= 1
    found = [side for side, count in sides.most_common(1) if count > 0]
    return found[0] if found else 4 * width


def _bytes(number: float) -> str:
    return format_bytes(round(number))


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
