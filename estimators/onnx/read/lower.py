"""A model made plain: local functions inlined, constants turned into weights, free dims given their sizes, dead nodes gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from memopt.errors import BadFile, UsageError
from memopt.estimators.onnx.read.fake_quantize import with_fake_quantization
from memopt.estimators.onnx.read.graph import Function, Graph, Model, Node, Port, Reference, Weight, subgraphs

MOST_NODES = 500_000
"""Functions within functions can write a graph of any size; no honest model has this many nodes."""

MOST_DIM = 2**31 - 1


def lower(model: Model) -> Graph:
    """The model's graph without calls of local functions and without Constant nodes, quantised pairs joined."""
    _check_size(model)
    inliner = _Inliner(model.functions)
    nodes = inliner.inline(model.graph.nodes, {}, {})
    graph = dataclasses.replace(model.graph, nodes=tuple(nodes))
    return without_dead(with_fake_quantization(hoist_constants(graph)))


def _check_size(model: Model) -> None:
    """Functions that call functions can double at every level: count before anything is written out."""
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Iterable[Node]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op)
            if key in model.functions and key not in sizes:
                sizes[key] = size(model.functions[key].nodes)
            total += sizes.get(key, 1) + sum(size(g.nodes) for g in subgraphs(node))
        return total

    written = size(model.graph.nodes)
    if written > MOST_NODES:
        raise BadFile(
            f"the model writes itself out to {written} nodes",
            why=f"its functions call each other; {MOST_NODES} is the most",
        )


class _Inliner:
    def __init__(self, functions: Mapping[tuple[str, str], Function]) -> None:
        self.functions = functions
        self.calls = 0

    def inline(self, nodes: Iterable[Node], names: Mapping[str, str], given: Mapping[str, Any]) -> list[Node]:
        out: list[Node] = []
        for node in nodes:
            if names or given or any(True for _ in subgraphs(node)):
                node = self._renamed(node, names, given)
            function = self.functions.get((node.domain, node.op))
            if function is not None:
                out += self._body(node, function)
            else:
                out.append(node)
        return out

    def _body(self, call: Node, function: Function) -> list[Node]:
        self.calls += 1
        prefix = f"{call.op}:{self.calls}/"
        names: dict[str, str] = {"": ""}
        for inner, outer in zip(function.inputs, call.inputs, strict=False):
            names[inner] = outer
        for inner in function.inputs[len(call.inputs) :]:
            names[inner] = ""
        for inner, outer in zip(function.outputs, call.outputs, strict=False):
            names.setdefault(inner, outer or prefix + inner)
        for node in function.nodes:
            for name in node.outputs:
                names.setdefault(name, prefix + name)
        given = {**function.defaults, **call.attributes}
        body = self.inline(function.nodes, names, given)
        passed = [
            Node("Identity", "", (names[inner],), (outer,))
            for inner, outer in zip(function.outputs, call.outputs, strict=False)
            if outer and names.get(inner) != outer
        ]
        return body + passed

    def _renamed(self, node: Node, names: Mapping[str, str], given: Mapping[str, Any]) -> Node:
        attributes = {
            key: self._attribute(value, names, given)
            for key, value in node.attributes.items()
            if not (isinstance(value, Reference) and value.name not in given)
        }
        inputs = tuple(names.get(n, n) for n in node.inputs)
        outputs = tuple(names.get(n, n) for n in node.outputs)
        return dataclasses.replace(node, inputs=inputs, outputs=outputs, attributes=attributes)

    def _attribute(self, value: Any, names: Mapping[str, str], given: Mapping[str, Any]) -> Any:
        if isinstance(value, Reference):
            return given[value.name]
        if isinstance(value, Graph):
            own = {p.name for p in value.inputs} | set(value.weights)
            inner = {k: v for k, v in names.items() if k not in own}
            outputs = tuple(inner.get(n, n) for n in value.outputs)
            return dataclasses.replace(
                value, nodes=tuple(self.inline(value.nodes, inner, given)), outputs=outputs
            )
        return value


def hoist_constants(graph: Graph) -> Graph:
    """Every Constant node becomes a weight of the graph that it stands in."""
    weights = dict(graph.weights)
    nodes: list[Node] = []
    for node in graph.nodes:
        weight = _constant(node)
        if weight is not None:
            weights[weight.name] = weight
            continue
        if any(True for _ in subgraphs(node)):
            attributes = {
                k: hoist_constants(v) if isinstance(v, Graph) else v for k, v in node.attributes.items()
            }
            node = dataclasses.replace(node, attributes=attributes)
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes), weights=weights)


def _constant(node: Node) -> Weight | None:
    if node.op != "Constant" or node.domain or len(node.outputs) != 1:
        return None
    name = node.outputs[0]
    for key in ("value", "sparse_value"):
        value = node.attributes.get(key)
        if isinstance(value, Weight):
            return dataclasses.replace(value, name=name)
    for key, kind, number in (("value_int", 7, np.int64), ("value_ints", 7, np.int64),
                              ("value_float", 1, np.float32), ("value_floats", 1, np.float32)):  # fmt: skip
        if node.attributes.get(key) is not None:
            values = np.asarray(node.attributes[key], dtype=number)
            return Weight(name, kind, values.shape, values)
    if "value_string" in node.attributes or "value_strings" in node.attributes:
        strings = node.attributes.get("value_strings", ("",))
        return Weight(name, 8, (len(strings),) if "value_strings" in node.attributes else ())
    return None


def reads(node: Node) -> set[str]:
    """The names that a node needs, those that its branches and bodies take from outside included."""
    names = {n for n in node.inputs if n}
    for graph in subgraphs(node):
        names |= captured(graph)
    return names


def captured(graph: Graph) -> set[str]:
    """Names that a subgraph takes from around it."""
    own = {p.name for p in graph.inputs} | set(graph.weights)
    needed: set[str] = set()
    for node in graph.nodes:
        needed |= reads(node) - own
        own.update(node.outputs)
    return needed | (set(graph.outputs) - own)


def without_dead(graph: Graph) -> Graph:
    """The graph without nodes whose results nobody reads, and without weights that nobody reads."""
    wanted = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(o in wanted for o in node.outputs if o):
            kept.append(node)
            wanted |= reads(node)
    weights = {name: w for name, w in graph.weights.items() if name in wanted}
    return dataclasses.replace(graph, nodes=tuple(reversed(kept)), weights=weights)


# free dims


def free_dims(graph: Graph) -> dict[str, list[tuple[str, int]]]:
    """Names of the dims that the file leaves open -> the (input, axis) that have them; nameless ones are `input.axis`."""
    free: dict[str, list[tuple[str, int]]] = {}
    for port in graph.inputs:
        for axis, dim in enumerate(port.dims or ()):
            if not isinstance(dim, int):
                free.setdefault(dim or f"{port.name}.{axis}", []).append((port.name, axis))
    return free


def batch_names(graph: Graph) -> set[str]:
    """The free dims that `--batch-size` means: the first axis of the inputs, and whatever is called batch."""
    free = free_dims(graph)
    called = {n for n in free if n.lower() in ("batch", "batch_size", "batchsize", "bs", "n", "b")}
    first = {n for n, places in free.items() if any(axis == 0 for _, axis in places)}
    return called or first


def fix_dims(graph: Graph, batch_size: int | None, dims: Mapping[str, int]) -> tuple[Graph, list[str]]:
    """The graph with every input dim a number, and what had to be said about it.

    Raises `UsageError` naming the dims that are still free and the flag that sets each.
    """
    free = free_dims(graph)
    for name, size in [*dims.items(), *([] if batch_size is None else [("batch", batch_size)])]:
        if not 1 <= size <= MOST_DIM:
            raise UsageError(
                f"{name} cannot be {size}", why="a dimension is at least 1", try_="--batch-size 32"
            )
    places = {
        f"{p.name}.{a}" for p in graph.inputs for a, d in enumerate(p.dims or ()) if not isinstance(d, int)
    }
    for name in dims:
        if name not in free and name not in places:
            known = ", ".join(free) or "none: every dim of its inputs is fixed"
            raise UsageError(
                f"the model has no free dim '{name}'", why=f"free dims: {known}", try_=_flags(free, graph)
            )
    sizes = dict(dims)
    notes: list[str] = []
    fixed_batch = False
    if batch_size is not None:
        names = batch_names(graph) - set(dims)
        _refuse_two_batches(batch_size, {n: dims[n] for n in batch_names(graph) if n in dims}, names)
        sizes.update(dict.fromkeys(names, batch_size))
        fixed_batch = not names and not (batch_names(graph) & set(dims))
    missing = [
        n for n, where in free.items() if n not in sizes and any(f"{i}.{a}" not in sizes for i, a in where)
    ]
    if missing:
        listed = ", ".join(f"'{n}' ({_places(free[n])})" for n in missing)
        raise UsageError(
            f"the model leaves dims free: {listed}", try_=_flags({n: free[n] for n in missing}, graph)
        )
    inputs = tuple(_fixed(p, sizes, batch_size if fixed_batch else None, notes) for p in graph.inputs)
    return dataclasses.replace(graph, inputs=inputs), notes


def _refuse_two_batches(batch_size: int, given: Mapping[str, int], left: set[str]) -> None:
    """Raise `UsageError` where every dim that `--batch-size` means has another size by `--dim`."""
    other = {name: size for name, size in given.items() if size != batch_size}
    if other and not left:
        told = ", ".join(f"--dim {name}={size}" for name, size in other.items())
        raise UsageError(
            f"--batch-size {batch_size} and {told} contradict each other", try_="one of the two alone"
        )


def _places(places: list[tuple[str, int]]) -> str:
    return ", ".join(f"axis {axis} of {name}" for name, axis in places[:3])


def _flags(free: Mapping[str, Any], graph: Graph) -> str:
    batch = batch_names(graph)
    flags = ["--batch-size 32"] if any(n in batch for n in free) else []
    flags += [f"--dim {n}=512" for n in free if n not in batch]
    return " ".join(flags) or "memopt estimate MODEL.onnx without --dim"


def _fixed(port: Port, sizes: Mapping[str, int], batch_size: int | None, notes: list[str]) -> Port:
    if port.dims is None:
        raise UsageError(
            f"the input '{port.name}' has no shape in the file",
            why="an estimate needs the rank of every input",
            try_="export it with its input shapes",
        )
    dims: list[int] = []
    for axis, dim in enumerate(port.dims):
        place = f"{port.name}.{axis}"
        dims.append(dim if isinstance(dim, int) else sizes[place] if place in sizes else sizes[dim or place])
    if batch_size is not None and dims and dims[0] != batch_size:
        notes.append(
            f"the file fixes the batch of '{port.name}' at {dims[0]}: {batch_size} was put in its place; "
            "export with a dynamic batch to be sure"
        )
        dims[0] = batch_size
    return dataclasses.replace(port, dims=tuple(dims))
