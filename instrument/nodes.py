"""What an autograd node saved, and with which arguments its op was called.

The raw slots are looked at, not their tensors: reading a tensor would call the unpack hook of whoever packed it, and
a second unpack inside non-reentrant `checkpoint` recomputes out of turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import torch

from memopt.instrument.torch_internals import current_node

_OUTPUT = re.compile(r"(?:result|output)(\d*)")
_BACKWARD = re.compile(r"Backward\d*$")
_BY_OP = torch.__version__ >= "2.13"
"""Does autograd name the op in its errors (`Tanh`), not the node (`TanhBackward0`)?"""


@dataclass(frozen=True, slots=True)
class _Names:
    """Of what a node has."""

    saved_tensors: tuple[str, ...]
    """`_raw_saved_result`, ..."""
    numbers: tuple[str, ...]
    """`_saved_dim`, ..."""
    is_function: bool
    """A script's, or a library's, which has `saved_tensors`."""


def _names_of(node: Any) -> _Names:
    """A node of torch's own has what its type has; to look takes as long as several small ops."""
    kind: Any = type(node)
    return _look(dir(node)) if hasattr(node, "__dict__") else _names_of_type(kind)


@cache
def _names_of_type(kind: Any) -> _Names:
    return _look(dir(kind))


def _look(names: list[str]) -> _Names:
    known = set(names)
    return _Names(
        tuple(n for n in names if n.startswith("_raw_saved_")),
        tuple(n for n in names if n.startswith("_saved_") and f"_raw{n}" not in known),
        "saved_tensors" in known,
    )


def node_of(tensor: torch.Tensor) -> Any | None:
    """The node that made `tensor`. None of a leaf, and of a view that autograd refuses since its base was written: asking raises then."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def nodes_below(roots: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes that backward from `roots` comes by: half a microsecond each."""
    waiting: list[Any] = [node_of(root) for root in roots]
    found: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [each for each, _ in node.next_functions]
    found.discard(None)
    return found


_OWN_TYPE = re.compile(r"AccumulateGrad|\w+Backward\d+")


def saves_by_hooks_alone(kind: type[Any]) -> bool:
    """Does a node of this type read nothing but gradients and what saved-tensor hooks have seen? So it is with torch's own derivatives;
    a `Function`, of Python or C++, may keep other tensors, and a `CopySlices` has such a node inside."""
    return kind.__module__ == "builtins" and _OWN_TYPE.fullmatch(kind.__name__) is not None


def is_torchs_own(node: Any) -> bool:
    """Is it a node of torch's, not of a script's or another library's `Function`, whose kernels no mode may see?"""
    function = getattr(type(node), "_forward_cls", None)
    if function is not None:
        return str(function.__module__).split(".")[0] == "torch"
    return _BACKWARD.search(node.name()) is not None


def saved_by(node: Any) -> Iterator[tuple[str, Any]]:
    """(slot name, what the pack hook gave) for all that `node` saved; the names of a list are numbered."""
    names = _names_of(node)
    for attribute in names.saved_tensors:
        packed = _packed(node, attribute)
        name = "saved_tensors" if names.is_function else attribute.removeprefix("_raw_saved_")
        for place, handle in enumerate(packed):
            yield (name if len(packed) == 1 else f"{name}[{place}]"), handle


def _packed(node: Any, attribute: str) -> list[Any]:
    try:
        raw = getattr(node, attribute)
    except RuntimeError:
        return []
    packed = [item.data for item in (raw if isinstance(raw, tuple) else (raw,))]
    return [handle for handle in packed if handle is not None]


def attributes_of(node: Any) -> dict[str, Any]:
    """Plain numbers that `node` keeps beside its tensors (None: the bound that `clamp` was not given), and which of its inputs need a gradient."""
    found: dict[str, Any] = {}
    for attribute in _names_of(node).numbers:
        try:
            value = getattr(node, attribute)
        except RuntimeError:
            continue
        if _is_simple(value):
            name = attribute.removeprefix("_saved_")
            found[name] = list(value) if isinstance(value, tuple) else value
    found["needs_input_grad"] = [edge[0] is not None for edge in node.next_functions]
    return found


def as_json(attributes: dict[str, Any]) -> str:
    """As a profile keeps what `attributes_of` gives; empty where a text among it is none that can be written."""
    try:
        return msgspec.json.encode(attributes).decode()
    except ValueError:
        return ""


def output_in_words(handle: object) -> str:
    """`, which is output 0 of Exp,` where the running node saved `handle` as an output of its own; else nothing is known."""
    node = current_node()
    for name, packed in saved_by(node) if node is not None else ():
        number = _OUTPUT.fullmatch(name)
        if packed is handle and number is not None:
            maker = _BACKWARD.sub("", node.name()) if _BY_OP else node.name()
            return f", which is output {number[1] or 0} of {maker},"
    return ""


def _is_simple(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < 16 and all(isinstance(v, (bool, int, float)) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))
