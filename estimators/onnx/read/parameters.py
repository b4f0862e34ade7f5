"""Which of a model's weights are trained: torch.onnx may have written it down; else the place where a weight is used tells.

A floating-point initialiser is a parameter when it reaches, as it is or moved about (cast, transposed, sliced, joined), a
weight's place: a convolution's kernel, a matrix product, a norm's scale, an embedding's table. Where it is added or
multiplied elementwise (a class token, a layer scale, a mask, a rotary table) its name and rank decide.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from memopt.estimators.onnx.read.graph import Graph, Node, Weight, subgraphs
from memopt.estimators.onnx.read.lower import captured, reads, without_dead

FLOATS = {1, 10, 11, 16}
INTEGERS = {2, 3, 21, 22}
"""Element types of quantised weights, 4-bit ones last."""

MOVERS = {
    "Cast", "CastLike", "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze",
    "Tile", "Transpose", "Unsqueeze",
}  # fmt: skip

_WEIGHT_SLOTS: dict[str, tuple[int, ...]] = {
    "Attention": (0, 1, 2), "BatchNormalization": (1, 2), "Conv": (1, 2), "ConvTranspose": (1, 2),
    "DeformConv": (1, 3), "Einsum": (0, 1, 2), "FusedConv": (1, 2), "FusedGemm": (0, 1, 2), "FusedMatMul": (0, 1),
    "GRU": (1, 2, 3), "Gather": (0,), "GroupQueryAttention": (), "Gemm": (0, 1, 2), "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2), "LSTM": (1, 2, 3, 7), "LayerNormalization": (1, 2), "MatMul": (0, 1),
    "PRelu": (1,), "RMSNormalization": (1,), "RNN": (1, 2, 3), "RotaryEmbedding": (),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3, 4), "SkipSimplifiedLayerNormalization": (2, 3),
}  # fmt: skip
_ELEMENTWISE = {"Add", "Concat", "Div", "Expand", "Mul", "Pow", "ScatterND", "Sub", "Tile", "Where"}
_KEPT_STILL = {"BatchNormalization": (3, 4), "LSTM": (4, 5, 6), "GRU": (4, 5), "RNN": (4, 5)}

_MADE_UP = re.compile(
    r"_?val_\d+|onnx::.*|.*Constant.*|.*_output_\d+|.*lifted.*|_?tensor_constant.*|c_.*|const.*|\d+|.*/.*|"
    r"(getitem|arange|embedding|mul|add|sub|div|cat|expand|unsqueeze|view|where|cos|sin|full|ones|zeros|tril|slice)(_\d+)?"
)
_BUFFERS = re.compile(
    r"(^|.*[._])(running_(mean|var)|num_batches_tracked|inv_freq|(cos|sin)(_cached?|_table)?|.*mask|position_ids|anchors?|"
    r"freqs(_cis)?|tril|causal_bias|pixel_(mean|std)|mean|std|pe|sinusoid.*)$"
)


def made_up(name: str) -> bool:
    """Whether an exporter invented the name: a trained weight keeps the module's name, unless it was folded."""
    return _MADE_UP.fullmatch(name) is not None


def parameters(graph: Graph) -> dict[str, Weight]:
    """The weights of `graph` that a training run would train, in the file's order."""
    found: set[str] = set()
    carried: dict[str, frozenset[str]] = {
        name: frozenset((name,)) for name, w in graph.weights.items() if w.kind in FLOATS and w.elements > 0
    }
    _visit(graph.nodes, graph.weights, carried, found)
    return {name: w for name, w in graph.weights.items() if name in found}


def _visit(
    nodes: Iterable[Node], weights: Mapping[str, Weight], carried: dict[str, frozenset[str]], found: set[str]
) -> None:
    for node in nodes:
        for inner in subgraphs(node):
            if captured(inner) & carried.keys():
                _visit(inner.nodes, weights, carried, found)
        for index, name in enumerate(node.inputs):
            for root in carried.get(name, ()):
                if _is_trained(node, index, name, weights[root], carried):
                    found.add(root)
        if (node.op in MOVERS or node.op == "FakeQuantize") and node.inputs:
            moved = node.inputs if node.op == "Concat" else node.inputs[:1]
            roots = frozenset().union(*(carried.get(n, frozenset()) for n in moved))
            if roots and all(n in carried for n in moved):
                carried.update({o: roots for o in node.outputs if o})


def _is_trained(
    node: Node, index: int, name: str, root: Weight, carried: Mapping[str, frozenset[str]]
) -> bool:
    if root.told:
        return root.told == "PARAMETER"
    if index in _KEPT_STILL.get(node.op, ()) or _BUFFERS.fullmatch(root.name.lower()):
        return False
    if node.domain == "com.microsoft" and node.op not in _WEIGHT_SLOTS:
        return len(root.dims) >= 1 and root.elements > 1
    if index in _WEIGHT_SLOTS.get(node.op, ()):
        return root.elements > 1 and (node.op != "Gather" or len(root.dims) >= 2)
    if node.op not in _ELEMENTWISE or root.elements <= 1 or (node.op == "Where" and index == 0):
        return False
    alone = all(n in carried for n in node.inputs if n)
    if node.op in MOVERS and alone:
        return False
    return not made_up(root.name) or (len(root.dims) == 1 and node.op in ("Add", "Mul"))


def twins(graph: Graph, trained: Mapping[str, Weight]) -> list[tuple[str, str]]:
    """Pairs (embedding table, head) that may be one tied weight of which folding made a transposed copy."""
    tables = {n.inputs[0] for n in graph.nodes if n.op == "Gather" and n.inputs[0] in trained}
    products = {n.inputs[1] for n in graph.nodes if n.op == "MatMul" and n.inputs[1] in trained}
    return [
        (a, b)
        for a in sorted(tables)
        for b in sorted(products - {a})
        if len(trained[a].dims) == 2 and trained[b].dims == trained[a].dims[::-1] and made_up(b)
    ]


def pack(
    graph: Graph, trained: Mapping[str, Weight], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Graph, dict[str, Weight]]:
    """The graph with re-ordered weights taken as they come out: the parameters of the script's module.

    An LSTM's gates stand in another order in ONNX than in PyTorch; an exporter that does not fold constants writes
    slices and joins of the weights into the graph, which no script's forward pass has.
    """
    makers = {o: n for n in graph.nodes for o in n.outputs if o}
    packed: dict[str, Weight] = {}
    for node in graph.nodes:
        if node.op in MOVERS:
            continue
        for name in node.inputs:
            chain = _chain(name, makers, trained) if name in makers else None
            if chain is None or name not in shapes:
                continue
            roots, inside = chain
            weight = Weight(name, trained[next(iter(roots))].kind, shapes[name])
            whole = weight.elements == sum(trained[r].elements for r in roots)
            joined = any(makers[n].op == "Concat" for n in inside)
            if whole and joined and _only_here(graph, roots, inside, name):
                packed[name] = weight
    if not packed:
        return graph, dict(trained)
    nodes = tuple(n for n in graph.nodes if not (set(n.outputs) & packed.keys()))
    graph = without_dead(dataclasses.replace(graph, nodes=nodes, weights={**graph.weights, **packed}))
    return graph, {n: w for n, w in graph.weights.items() if n in packed or n in trained}


def _chain(
    name: str, makers: Mapping[str, Node], trained: Mapping[str, Weight]
) -> tuple[dict[str, None], set[str]] | None:
    """Trained weights that `name` is moved together from, and the names on the way; None when anything else is in it."""
    roots: dict[str, None] = {}
    inside: set[str] = set()
    stack = [name]
    while stack:
        at = stack.pop()
        if at in trained:
            roots[at] = None
            continue
        node = makers.get(at)
        if node is None or node.op not in MOVERS or len(inside) > 256:
            return None
        inside.add(at)
        stack += [n for n in (node.inputs if node.op == "Concat" else node.inputs[:1]) if n not in inside]
    return (roots, inside) if roots else None


def _only_here(graph: Graph, roots: Iterable[str], inside: set[str], name: str) -> bool:
    """Whether the weights and what is made of them on the way are read by nothing outside the chain."""
    private = set(roots) | (inside - {name})
    return not private & set(graph.outputs) and all(
        not (reads(n) & private) or bool(set(n.outputs) & inside) for n in graph.nodes
    )
