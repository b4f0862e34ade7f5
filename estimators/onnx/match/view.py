"""A graph as the matchers see it: who computes a value, who reads it, its shape, and its number if it is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from memopt.estimators.onnx.ops.registry import numbers_of
from memopt.estimators.onnx.read.graph import Graph, Node
from memopt.estimators.onnx.read.lower import reads, without_dead

OUTSIDE = "@output"


class View:
    """A graph, the values that are known in it, and the shape of every value."""

    def __init__(
        self, graph: Graph, values: Mapping[str, Any], trained: Iterable[str], producer: str, opset: int
    ) -> None:
        self.graph = graph
        self.values = values
        self.trained = set(trained)
        self.from_torch = "pytorch" in producer
        self.opset = opset
        self.makers: dict[str, Node] = {o: n for n in graph.nodes for o in n.outputs if o}
        self.readers: dict[str, set[str]] = {}
        for node in graph.nodes:
            for name in reads(node):
                self.readers.setdefault(name, set()).add(node.outputs[0])
        for name in graph.outputs:
            self.readers.setdefault(name, set()).add(OUTSIDE)

    def maker(self, name: str, *ops: str) -> Node | None:
        """The node that computes `name`, when it is one of `ops` (domain left aside)."""
        node = self.makers.get(name)
        return node if node is not None and node.op in ops else None

    def tensor(self, name: str) -> Tensor | None:
        value = self.values.get(name)
        return value if isinstance(value, Tensor) else None

    def known(self, name: str) -> Tensor | None:
        from memopt.estimators.onnx.interpret import is_known

        value = self.values.get(name)
        return value if is_known(value) else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        value = self.tensor(name)
        return tuple(value.shape) if value is not None else None

    def scalar(self, name: str) -> float | None:
        """The number that `name` is known to be."""
        known = self.known(name)
        return float(numbers_of(known)[0]) if known is not None and known.numel() == 1 else None

    def closed(self, inside: Iterable[str], root: Node) -> bool:
        """Whether the values `inside` are read by the matched nodes only, so that fusing loses nobody's input."""
        names = set(inside)
        matched = {self.makers[n].outputs[0] for n in names if n in self.makers} | {root.outputs[0]}
        return all(self.readers.get(n, set()) <= matched for n in names)

    def either(self, node: Node) -> list[tuple[str, str]]:
        """The two inputs of a commutative node in both orders."""
        a, b = node.inputs[:2]
        return [(a, b), (b, a)]

    def same(self, a: str, b: str) -> bool:
        """Whether two names hold the same value: one name, or the same op on the same inputs."""
        if a == b:
            return True
        one, other = self.makers.get(a), self.makers.get(b)
        if one is None or other is None or (one.op, len(one.inputs)) != (other.op, len(other.inputs)):
            return False
        return one.op in ("Sub", "Cast") and all(
            x == y for x, y in zip(one.inputs, other.inputs, strict=True)
        )


Pattern = Callable[[View, Node], Node | None]


def rewrite(view: View, pattern: Pattern) -> tuple[Graph, int]:
    """The graph with every node that `pattern` replaces replaced, dead ones gone, and how many there were."""
    replaced: dict[str, Node] = {}
    for node in view.graph.nodes:
        new = pattern(view, node) if node.outputs else None
        if new is not None:
            replaced[node.outputs[0]] = new
    if not replaced:
        return view.graph, 0
    nodes = tuple(replaced.get(n.outputs[0], n) if n.outputs else n for n in view.graph.nodes)
    return without_dead(dataclasses.replace(view.graph, nodes=nodes)), len(replaced)


def same_type(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and a.dtype.is_floating_point


def without_aliases(view: View) -> Graph:
    """The graph without nodes that change nothing: Identity, a cast to the same type, dropout of nothing."""
    names: dict[str, str] = {}
    for node in view.graph.nodes:
        source = names.get(node.inputs[0], node.inputs[0]) if node.inputs else ""
        if _changes_nothing(view, node) and node.outputs[0] not in view.graph.outputs:
            names[node.outputs[0]] = source
    if not names:
        return view.graph
    nodes = tuple(_renamed(n, names) for n in view.graph.nodes)
    return without_dead(dataclasses.replace(view.graph, nodes=nodes))


def _changes_nothing(view: View, node: Node) -> bool:
    if node.op == "Identity":
        return isinstance(view.values.get(node.inputs[0]), Tensor)
    if node.op in ("Cast", "CastLike"):
        a, b = view.tensor(node.inputs[0]), view.tensor(node.outputs[0])
        return a is not None and b is not None and a.dtype == b.dtype
    if node.op == "Dropout" and len(node.outputs) == 1:
        if len(node.inputs) > 1 and node.inputs[1]:
            return view.scalar(node.inputs[1]) == 0.0
        return node.attributes.get("ratio") == 0.0
    return False


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    attributes = {
        k: _graph_renamed(v, names) if isinstance(v, Graph) else v for k, v in node.attributes.items()
    }
    return dataclasses.replace(
        node, inputs=tuple(names.get(n, n) for n in node.inputs), attributes=attributes
    )


def _graph_renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    nodes = tuple(_renamed(n, names) for n in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes, outputs=tuple(names.get(o, o) for o in graph.outputs))


def is_bool(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.bool
