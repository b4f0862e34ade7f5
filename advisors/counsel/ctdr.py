"""CTDR: tensor decomposition with recomputation (convolutions by Tucker-2, Kim et al. 2016, arXiv 1511.06530; matrices in two factors).

Rule: a convolution of c -> d channels and k x k becomes 1x1 (c -> p), k x k (p -> q), 1x1 (q -> d) with p and q at `RANK` of
the sides; a matrix c -> d becomes c -> r -> d. Parameters, their gradients and the optimizer's state shrink with the weights;
the inserted layers save what they pass on for backward, which is counted in full, and again with those thin tensors recomputed.
Taken are the layers whose states shrink by more than their activations grow. O(ops). Differs: ranks are a share of the sides,
where Kim et al. choose them by variational Bayes from the weights, which no profile has. It changes the model: results differ,
the state dict too, accuracy has to be trained back. So it is advice, refused without `--allow model-change`, reckoned from
shapes, not simulated; the reconstruction error needs the weights, which no profile has.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from memopt.advisors.counsel.counsel import Advice
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.registry import counsel
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.elsewhere.op_shapes import tensor_of
from memopt.estimators.elsewhere.op_time import TensorShape
from memopt.estimators.simulator.trace_view import TraceView
from memopt.plan import ScriptAction
from memopt.trace import CATEGORIES
from memopt.units import format_bytes

RANK = 0.25
"""Of the channels: a quarter, which is what the advice is an example of; a person chooses by the accuracy that is left."""
_MOST_ROWS = 8
"""Layers that are named one by one: a table for a screen."""
_PRODUCTS = ("addmm", "mm", "bmm", "linear", "_addmm_activation", "matmul")


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight that can be decomposed, and what that would change, in elements."""

    storage: int
    label: str
    shape: tuple[int, ...]
    item_bytes: int
    fewer_weights: int
    more_activations: int

    @property
    def more_bytes(self) -> int:
        """Saved for backward by the inserted layers."""
        return self.more_activations * self.item_bytes

    def fewer_bytes(self, factor: float) -> int:
        """Of the weight and, by `factor`, of what lives beside it (`state_factor`)."""
        return round(self.fewer_weights * self.item_bytes * factor)


@counsel
class Ctdr:
    name = "ctdr"
    paper = "Kim et al. 2016, Compression of Deep Convolutional Neural Networks (Tucker-2), with recomputation of what it inserts"
    needs = "--allow model-change, and weights that outweigh activations; advice only"
    allows = frozenset({"model-change"})
    not_on_graphs = "it changes the layers of the model"
    enforced = False

    def study(self, problem: Problem, allow: frozenset[str], /) -> Advice:
        if "model-change" not in allow:
            raise UsageError(
                "ctdr changes the model: other weights, other results",
                why="memopt does not even advise that unless it is asked to",
                try_="--allow model-change",
            )
        factor = state_factor(problem.view, problem.plain.peak_op)
        layers = worthwhile(problem.view, factor)
        states = sum(each.fewer_bytes(factor) for each in layers)
        grows = sum(each.more_bytes for each in layers)
        plain = problem.unplanned_peak_bytes
        kept = plain - states + grows
        again = kept - grows + max(each.more_bytes for each in layers)
        what = f"{len(layers)} layers in factors of rank {RANK:g}"
        return Advice(
            strategy=self.name,
            verdict=f"With {what} of their sides the peak would be about {format_bytes(again)} instead of {format_bytes(plain)}. This changes the model.",
            rows=(
                (f"weights, gradients and state of {len(layers)} layers that are there at the peak shrink by", format_bytes(states)),
                ("the inserted layers save for backward", format_bytes(grows)),
                ("peak, these kept", format_bytes(kept)),
                ("peak, these recomputed one layer at a time", format_bytes(again)),
                *(
                    (each.label, f"-{format_bytes(each.fewer_bytes(factor))}, activations +{format_bytes(each.more_bytes)}")
                    for each in layers[:_MOST_ROWS]
                ),
            ),
            figures={
                "layers": len(layers),
                "state_bytes": states,
                "activation_bytes": grows,
                "peak_bytes_kept": kept,
                "peak_bytes": again,
                "rank": RANK,
            },
            peak_bytes=again,
            actions=(ScriptAction(kind="model", what=what, why="CTDR", saved_bytes=max(0, plain - again)),),
            notes=(
                "changes the model: not the same results, not the same state dict; advice only, not enforced",
                "reckoned from shapes; how far the factors are from the weights needs the weights, which a profile does not have",
            ),
        )  # fmt: skip


def worthwhile(view: TraceView, factor: float) -> list[Layer]:
    """Layers whose states shrink by more than their activations grow, the most gain first. Raises `NotPossibleHere` for none."""
    found = [each for each in decomposable(view) if each.fewer_bytes(factor) > each.more_bytes]
    if not found:
        raise NotPossibleHere(
            "no layer of this model is worth decomposing",
            why="the layers that would be inserted save more than the weights shrink by",
        )
    return sorted(found, key=lambda each: each.more_bytes - each.fewer_bytes(factor))


def state_factor(view: TraceView, at: int) -> float:
    """Bytes of parameters and of the gradients and the optimizer's state that are there at op `at`, by the parameters' bytes."""
    held = dict.fromkeys(("parameter", "gradient", "optimizer state"), 0)
    for storage, kind in enumerate(view.trace.storages.category):
        if CATEGORIES[kind] in held and view.birth[storage] < at <= view.death[storage]:
            held[CATEGORIES[kind]] += int(view.size[storage])
    return sum(held.values()) / held["parameter"] if held["parameter"] else 1.0


def decomposable(view: TraceView) -> list[Layer]:
    """Weights of convolutions (one group) and of matrix products, with what their decomposition would change."""
    kind = CATEGORIES.index("parameter")
    found: dict[int, Layer] = {}
    for op in range(view.n):
        name = view.trace.op_name(op).split(".")
        if view.phase[op] != 0 or len(name) < 2 or not (name[1] in _PRODUCTS or "convolution" in name[1]):
            continue
        read = {view.value_storage[value] for value in view.reads[op]}
        weights = [s for s in read if view.trace.storages.category[s] == kind]
        shaped = [(s, tensor_of(view.trace, s)) for s in weights]
        others = [tensor_of(view.trace, s) for s in read if s not in weights]
        made = [tensor_of(view.trace, view.value_storage[value]) for value in view.writes[op]]
        for storage, weight in shaped:
            layer = _layer(view, storage, weight, others, made)
            if layer is not None and storage not in found:
                found[storage] = layer
    return list(found.values())


def _layer(
    view: TraceView, storage: int, weight: TensorShape, others: list[TensorShape], made: list[TensorShape]
) -> Layer | None:
    out = max(made, key=lambda t: t.elements, default=None)
    if out is None or len(weight.shape) not in (2, 4) or min(weight.shape[:2]) < 8:
        return None
    rows, columns = weight.shape[:2]
    if len(weight.shape) == 2:
        rank = max(1, round(RANK * min(rows, columns)))
        fewer = rows * columns - rank * (rows + columns)
        more = out.elements // max(1, out.shape[-1]) * rank
    else:
        source = next((t for t in others if len(t.shape) == 4 and t.shape[1] == columns), None)
        if source is None or out.shape[1:2] != (rows,):
            return None  # groups, or transposed
        narrow, wide = max(1, round(RANK * columns)), max(1, round(RANK * rows))
        taps = prod(weight.shape[2:])
        fewer = rows * columns * taps - (columns * narrow + narrow * wide * taps + wide * rows)
        more = source.elements // columns * narrow + out.elements // rows * wide
    label = view.trace.storage_label(storage)
    return Layer(storage, label, weight.shape, weight.size_bytes // max(1, weight.elements), fewer, more)
