"""Puts together again what exporters take apart, so that the graph trained is the script's: linear layers, activations,
norms and attention become the one operator that PyTorch runs (and whose backward saves less).

A PyTorch exporter leaves a trace of what the script called: the operator's name beside the node, or else the form
(`scaled_dot_product_attention` scales queries and keys each by the square root; from opset 20 or 23 the fused operators
exist, so a decomposed one was written by hand). Hand-written forms are left as they are. Models of other exporters are
matched by what they compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopt.estimators.onnx.match.attention import attention
from memopt.estimators.onnx.match.norm import group_norm, layer_norm, rms_norm
from memopt.estimators.onnx.match.recurrent import stacked
from memopt.estimators.onnx.match.view import Pattern, View, rewrite, without_aliases
from memopt.estimators.onnx.read.graph import Graph, Node


@dataclass(slots=True)
class Matched:
    """The rewritten graph and how many of each operator were found in it."""

    graph: Graph
    counts: dict[str, int] = field(default_factory=dict)


def match(
    graph: Graph, values: Mapping[str, Any], trained: Mapping[str, Any], producer: str, opset: int
) -> Matched:
    """`graph` with decomposed operators fused; `values` holds a tensor (known or fake) for every name in it."""
    graph = without_aliases(View(graph, values, trained, producer, opset))
    done = Matched(graph)
    for name, pattern in _PATTERNS:
        view = View(done.graph, values, trained, producer, opset)
        done.graph, count = rewrite(view, _told(pattern, *_CALLED.get(name, ())))
        if count:
            done.counts[name] = done.counts.get(name, 0) + count
    return done


def _told(pattern: Pattern, *calls: str) -> Pattern:
    """`pattern`, but not where the exporter wrote down that the script called none of `calls`."""

    def asked(view: View, node: Node) -> Node | None:
        if calls and node.call and not any(call in node.call for call in calls):
            return None
        return pattern(view, node)

    return asked


def rsqrt(view: View, node: Node) -> Node | None:
    """1 / sqrt(x), which is one operator in PyTorch."""
    if node.op == "Reciprocal":
        root = view.maker(node.inputs[0], "Sqrt")
    elif node.op == "Div" and view.scalar(node.inputs[0]) == 1.0:
        root = view.maker(node.inputs[1], "Sqrt")
    else:
        root = None
    if root is None or not view.closed(root.outputs, node):
        return None
    return Node("Rsqrt", "memopt", root.inputs, node.outputs)


def linear(view: View, node: Node) -> Node | None:
    """MatMul with a trained matrix, then Add of a trained vector."""
    if node.op != "Add" or len(node.inputs) != 2:
        return None
    for product, bias in view.either(node):
        made = view.maker(product, "MatMul")
        if made is None or not view.closed((product,), node):
            continue
        weight, added = view.shape(made.inputs[1]), view.shape(bias)
        if weight is None or len(weight) != 2 or added is None or len(added) > 1 or added[-1:] != weight[-1:]:
            continue
        if _still(view, made.inputs[1]) and _still(view, bias):
            return Node("Linear", "memopt", (*made.inputs, bias), node.outputs, {}, node.name)
    return None


def _still(view: View, name: str) -> bool:
    """Whether a value is a weight, or one only transposed or cast."""
    while name not in view.trained:
        node = view.maker(name, "Transpose", "Cast")
        if node is None:
            return name in view.graph.weights
        name = node.inputs[0]
    return True


# activations, by what they compute

_POINTS = np.array([-6.0, -3.5, -2.0, -1.1, -0.4, 0.0, 0.3, 0.9, 1.7, 2.9, 4.5, 7.0])
_erf = np.vectorize(math.erf)

_POINTWISE: dict[str, Any] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power,
    "Erf": _erf, "Tanh": np.tanh, "Exp": np.exp, "Neg": np.negative, "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)), "Softplus": lambda x: np.log1p(np.exp(x)),
    "Sqrt": np.sqrt, "Reciprocal": lambda x: 1 / x, "Log": np.log,
}  # fmt: skip
_TELLING = {"Erf", "Tanh", "Sigmoid", "Softplus", "HardSigmoid", "Clip", "Exp"}
_DEEPEST = 12
_WIDEST = 24

_WANTED: dict[str, tuple[Node, Any]] = {
    "gelu": (Node("Gelu", "", (), ()), 0.5 * _POINTS * (1 + _erf(_POINTS / math.sqrt(2)))),
    "gelu-tanh": (
        Node("Gelu", "", (), (), {"approximate": "tanh"}),
        0.5 * _POINTS * (1 + np.tanh(math.sqrt(2 / math.pi) * (_POINTS + 0.044715 * _POINTS**3))),
    ),
    "silu": (Node("Silu", "memopt", (), ()), _POINTS / (1 + np.exp(-_POINTS))),
    "mish": (Node("Mish", "", (), ()), _POINTS * np.tanh(np.log1p(np.exp(_POINTS)))),
    "hardswish": (Node("HardSwish", "", (), ()), _POINTS * np.clip(_POINTS + 3, 0, 6) / 6),
}


def activation(view: View, node: Node) -> Node | None:
    """A product that computes GELU, SiLU, Mish or hard swish of one value, recognised by evaluating it at a few points."""
    if node.op not in ("Mul", "Div"):
        return None
    cone = _cone(view, node.outputs[0])
    if not any(view.makers[n].op in _TELLING for n in cone if n in view.makers):
        return None
    for leaf in cone[1:]:
        inside: set[str] = set()
        values = _evaluate(view, node.outputs[0], leaf, inside, 0)
        if values is None:
            continue
        for name, (made, wanted) in _WANTED.items():
            if np.allclose(values, wanted, rtol=1e-3, atol=1e-4) and view.closed(
                inside - {node.outputs[0]}, node
            ):
                if not node.call and _written_by_hand(view, name, leaf, inside):
                    return None
                return Node(made.op, made.domain, (leaf,), node.outputs, made.attributes, node.name)
    return None


def _cone(view: View, name: str) -> list[str]:
    """Names from which `name` is computed pointwise, nearest first, as far as an activation can reach."""
    cone = [name]
    for at in cone:
        node = view.makers.get(at)
        if node is not None and _is_pointwise(node):
            cone += [n for n in dict.fromkeys(node.inputs) if n and n not in cone and view.scalar(n) is None]
        if len(cone) > _WIDEST:
            break
    return cone


def _is_pointwise(node: Node) -> bool:
    return not node.domain and (node.op in _POINTWISE or node.op in ("Clip", "HardSigmoid"))


def _evaluate(view: View, name: str, leaf: str, inside: set[str], depth: int) -> Any:
    """`name` as a function of `leaf` at the sample points; None when it needs anything else."""
    if name == leaf:
        return _POINTS
    number = view.scalar(name)
    if number is not None:
        return np.float64(number)
    node = view.makers.get(name)
    if node is None or depth > _DEEPEST or not _is_pointwise(node):
        return None
    inputs = [_evaluate(view, n, leaf, inside, depth + 1) for n in node.inputs if n]
    if any(i is None for i in inputs):
        return None
    inside.add(name)
    with np.errstate(all="ignore"):
        if node.op == "HardSigmoid":
            alpha, beta = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
            return np.clip(alpha * inputs[0] + beta, 0, 1)
        if node.op == "Clip":
            low, high = node.attributes.get("min", -np.inf), node.attributes.get("max", np.inf)
            return np.clip(
                inputs[0], inputs[1] if len(inputs) > 1 else low, inputs[2] if len(inputs) > 2 else high
            )
        return _POINTWISE[node.op](*inputs)


def _written_by_hand(view: View, name: str, leaf: str, inside: set[str]) -> bool:
    """Whether a PyTorch script spelled the GELU out: `F.gelu` never exports as (x / 2) times something."""
    if not view.from_torch or not name.startswith("gelu"):
        return False
    if view.opset >= 20:
        return True
    halves = [view.makers[n] for n in inside]
    return any(
        leaf in n.inputs
        and (
            (n.op == "Mul" and 0.5 in map(view.scalar, n.inputs))
            or (n.op == "Div" and view.scalar(n.inputs[1]) == 2.0)
        )
        for n in halves
    )


_CALLED = {
    "activation": ("gelu", "silu", "mish", "hardswish"),
    "layer norm": ("layer_norm",),
    "group norm": ("group_norm",),
    "attention": ("attention",),
    "linear": ("linear", "addmm"),
}
"""Operators by which a script asks for what is matched."""
_PATTERNS = (
    ("rsqrt", rsqrt),
    ("activation", activation),
    ("layer norm", layer_norm),
    ("RMS norm", rms_norm),
    ("group norm", group_norm),
    ("attention", attention),
    ("recurrent stack", stacked),
    ("linear", linear),
)
