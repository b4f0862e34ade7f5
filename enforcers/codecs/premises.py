"""Do the facts still hold on which a codec was chosen? A threshold may move and a layer may thaw between two iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memopt.codecs.of_readers import is_proven_on
from memopt.estimators.simulator.slot_needs import SLOT_NEEDS
from memopt.plan import SlotRef

_OWN = {"test", "stand_in"}
"""Parameters that tell the codec what to do, and are no attributes of the node."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor argument, without the tensor."""

    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op, by the names of its schema. Holds no tensor."""

    name: str
    given: dict[str, Any]


def describe_call(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """What codecs may depend on of a call."""
    given = {}
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        given[argument.name] = (
            TensorFacts(tuple(value.shape), value.requires_grad) if isinstance(value, Tensor) else value
        )
    return Call(name, given)


def hold(ref: SlotRef, call: Call | None) -> bool:
    """Was the op that saves `ref` called as the plan says, and do the same inputs need no gradient?"""
    if call is None or call.name != ref.consumer:
        return False
    if not _is_proven(ref.node, ref.slot, ref.consumer, ref.need):
        return False
    for name, value in ref.params.items():
        if (
            name not in _OWN
            and not _same(_find(call.given, name), value)
            and not _is_default_stride(call.given, name, value)
        ):
            return False
    places, rows = list(call.given.values()), SLOT_NEEDS.get(f"{ref.node}.{ref.slot}", ())
    left_out = {name for row in rows if row.kind == ref.need for name in row.takes} - set(ref.params)
    if any(_find(call.given, name) is not None for name in left_out):
        return False  # a bound that there was not
    for row in rows:
        if row.evaluating and call.given.get("training", call.given.get("train")) is not False:
            return False
        for place in row.frozen_inputs:
            found = places[place] if place < len(places) else None
            if isinstance(found, TensorFacts) and found.requires_grad:
                return False
    return True


@cache
def _is_proven(node: str, slot: str, consumer: str, need: str) -> bool:
    """Does the table say so of this slot, with this torch, and is `node` what autograd makes of op `consumer`? A plan may have been edited."""
    if not is_proven_on(torch.__version__):
        return False
    operator = consumer.split(".")[1].removesuffix("_forward") if consumer.count(".") else ""
    is_its_node = node.lower().rpartition("backward")[0] == operator.replace("_", "").lower()
    return is_its_node and any(row.kind == need for row in SLOT_NEEDS.get(f"{node}.{slot}", ()))


def _is_default_stride(given: dict[str, Any], name: str, planned: Any) -> bool:
    """No stride means that a pool's windows touch: `stride` is then the kernel's size, in the call or in the node."""
    if name != "stride":
        return False
    return _same(given.get("stride") or given.get("kernel_size"), planned or given.get("kernel_size"))


def _find(given: dict[str, Any], name: str) -> Any:
    owner, dot, what = name.rpartition(".")
    if dot and what == "size":
        facts = given.get(owner)
        return facts.shape if isinstance(facts, TensorFacts) else None
    return given.get(name)


def _same(found: Any, planned: Any) -> bool:
    if isinstance(found, (list, tuple)) or isinstance(planned, (list, tuple)):
        left = tuple(found) if isinstance(found, (list, tuple)) else (found,)
        right = tuple(planned) if isinstance(planned, (list, tuple)) else (planned,)
        return _spread(left, len(right)) == _spread(right, len(left))
    if found is None or planned is None:
        return found is planned
    return bool(found == planned)


def _spread(items: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """`(2,)` means `(2, 2)` for a pool."""
    return items * length if len(items) == 1 and length > 1 else items
