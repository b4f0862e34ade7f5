"""What each saved tensor is really read for in backward, and the weakest codec that serves all its readers.

One row per (autograd node, saved slot); a slot that has no row needs its values. Every row was proven by replacing the slot
with decode(encode(x)) and comparing gradients bit for bit on torch 2.13 CPU (`tests/enforcers/codecs/test_codecs.py` walks this very table).
The same holds when the backward is differentiated in turn, with `create_graph=True` (`tests/enforcers/test_breaker_enforce.py`).

A row holds for the node *and its attributes*; `frozen_inputs` rows also depend on which inputs of the node need a gradient.
A script that unfreezes a layer later breaks that premise: compare `needs_input_grad` again before trusting the row
(in unpack, `torch._C._current_autograd_node()` is the reader).

Data only: imports neither torch nor anything of memopt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Value: TypeAlias = bool | int | float | str | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Need:
    """What backward reads of a saved tensor: `nothing`, `predicate`, `pool_index` or `values`, and with what parameters."""

    kind: str
    params: tuple[tuple[str, Value], ...] = ()

    @property
    def parameters(self) -> dict[str, Value]:
        return dict(self.params)


VALUES = Need("values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: the need, the node attributes it takes as parameters, and the premises it stands on."""

    kind: str
    fixed: tuple[tuple[str, Value], ...] = ()
    takes: tuple[str, ...] = ()
    frozen_inputs: tuple[int, ...] = ()
    evaluating: bool = False


def _nothing(
    *, frozen_inputs: tuple[int, ...] = (), evaluating: bool = False, stand_in: str = "empty"
) -> Row:
    """`stand_in`: `empty` = a storage of 0 bytes is fine; `real` = the kernel touches the memory without using it."""
    return Row(
        kind="nothing", fixed=(("stand_in", stand_in),), frozen_inputs=frozen_inputs, evaluating=evaluating
    )


def _predicate(test: str, *takes: str) -> Row:
    return Row(kind="predicate", fixed=(("test", test),), takes=takes)


_POOL = Row(kind="pool_index", takes=("kernel_size", "stride", "padding", "dilation", "self.size"))
_UNREAD = _nothing()
_MASK = _predicate("mask")

SLOT_NEEDS: dict[str, tuple[Row, ...]] = {
    "ReluBackward0.result": (_predicate("relu"),),
    "ThresholdBackward0.self": (_predicate("threshold", "threshold"),),
    "ThresholdBackward1.self": (_predicate("threshold", "threshold"),),
    "LeakyReluBackward0.self": (_predicate("leaky_relu", "negative_slope"),),
    "LeakyReluBackward1.result": (_predicate("leaky_relu", "negative_slope"),),
    "HardtanhBackward0.self": (_predicate("hardtanh", "min_val", "max_val"),),
    "HardsigmoidBackward0.self": (_predicate("hardsigmoid"),),
    "HardshrinkBackward0.self": (_predicate("hardshrink", "lambd"),),
    "SoftshrinkBackward0.self": (_predicate("softshrink", "lambd"),),
    "ClampBackward1.self": (_predicate("clamp", "min", "max"),),
    "ClampMinBackward0.self": (_predicate("clamp", "min"),),
    "ClampMaxBackward0.self": (_predicate("clamp", "max"),),
    "MaskedFillBackward0.mask": (_MASK,),
    "MaskedFillBackward1.mask": (_MASK,),
    "MaskedSelectBackward0.mask": (_MASK,),
    "MaskedScatterBackward0.mask": (_MASK,),
    "WhereBackward0.condition": (_MASK,),
    "NativeDropoutBackward0.result1": (_MASK,),
    "MaxPool2DWithIndicesBackward0.self": (_UNREAD,),
    "MaxPool3DWithIndicesBackward0.self": (_UNREAD,),
    "AdaptiveMaxPool2DBackward0.self": (_UNREAD,),
    "AdaptiveMaxPool3DBackward0.self": (_UNREAD,),
    "FractionalMaxPool2DBackward0.self": (_UNREAD,),
    "FractionalMaxPool3DBackward0.self": (_UNREAD,),
    "AvgPool2DBackward0.self": (_UNREAD,),
    "AvgPool3DBackward0.self": (_UNREAD,),
    "AdaptiveAvgPool2DBackward0.self": (_UNREAD,),
    "AdaptiveAvgPool3DBackward0.self": (_UNREAD,),
    "NllLossBackward0.self": (_UNREAD,),
    "NllLoss2DBackward0.self": (_UNREAD,),
    "ReflectionPad1DBackward0.self": (_UNREAD,),
    "ReflectionPad2DBackward0.self": (_UNREAD,),
    "ReflectionPad3DBackward0.self": (_UNREAD,),
    "ReplicationPad1DBackward0.self": (_UNREAD,),
    "ReplicationPad2DBackward0.self": (_UNREAD,),
    "ReplicationPad3DBackward0.self": (_UNREAD,),
    "GatherBackward0.self": (_UNREAD,),
    "TakeBackward0.self": (_UNREAD,),
    "MaskedSelectBackward0.self": (_nothing(stand_in="real"),),
    "CummaxBackward0.self": (_UNREAD,),
    "CumminBackward0.self": (_UNREAD,),
    "IndexAddBackward0.source": (_UNREAD,),
    "IndexCopyBackward0.source": (_UNREAD,),
    "MaxPool2DWithIndicesBackward0.result1": (_POOL,),
    "MaxPool3DWithIndicesBackward0.result1": (_POOL,),
    "ConvolutionBackward0.input": (_nothing(frozen_inputs=(1,), stand_in="real"),),
    "NativeBatchNormBackward0.input": (_nothing(frozen_inputs=(1, 2), evaluating=True, stand_in="real"),),
    "GridSampler2DBackward0.input": (_nothing(frozen_inputs=(1,), stand_in="real"),),
    "GridSampler3DBackward0.input": (_nothing(frozen_inputs=(1,), stand_in="real"),),
}
"""`Node.slot` -> rows, the first whose premises hold counts."""


def needs_of(node_name: str, slot: str, node_attributes: Mapping[str, object]) -> Need:
    """What `node_name` will read of `slot`; `VALUES` when nothing less is proven.

    `node_attributes`: as `codecs.attributes_of(node)` gives them: plain attributes by their name (`kernel_size`), the sizes of
    saved tensors (`self.size`), and `needs_input_grad`. An attribute that a row needs and that is missing means `VALUES`.
    """
    for row in SLOT_NEEDS.get(f"{node_name}.{slot}", ()):
        taken = _taken(row, node_attributes)
        if taken is not None and _premises_hold(row, node_attributes):
            return Need(row.kind, row.fixed + taken)
    return VALUES


def _taken(row: Row, attributes: Mapping[str, object]) -> tuple[tuple[str, Value], ...] | None:
    taken: list[tuple[str, Value]] = []
    for name in row.takes:
        value = attributes.get(name, ...)
        if isinstance(value, list | tuple) and all(isinstance(v, int) for v in value):
            taken.append((name, tuple(int(v) for v in value)))
        elif value is None or isinstance(value, bool | int | float | str):
            taken.append((name, value))
        else:
            return None
    return tuple(taken)


def _premises_hold(row: Row, attributes: Mapping[str, object]) -> bool:
    if row.evaluating and attributes.get("training") is not False:
        return False
    if not row.frozen_inputs:
        return True
    grads = attributes.get("needs_input_grad")
    return isinstance(grads, list | tuple) and all(
        i < len(grads) and grads[i] is False for i in row.frozen_inputs
    )


def weakest_common_codec(needs: Sequence[Need], value_codecs: Iterable[str] = ()) -> str | None:
    """The codec under which every reader of one storage lets go of it, or None: keep it.

    Readers that need no values are served each by its own stand-in (`nothing` beside a `predicate` costs one bit in all);
    as soon as one needs values, or two need different things, one exact copy of the whole storage serves all: the first of
    `value_codecs`, which the caller lists smallest first.
    """
    kinds = {need.kind for need in needs}
    if not kinds:
        return None
    asked = kinds - {"nothing"}
    if len(asked) > 1 or VALUES.kind in asked:
        return next(iter(value_codecs), None)
    return asked.pop() if asked else "nothing"
