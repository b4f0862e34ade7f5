"""Recurrent layers on top of each other put together again: PyTorch runs them in one call, and on a GPU in one kernel, which shows
nobody what one layer hands to the next; an ONNX file has a node a layer. Only layers of one module of the script are joined."""

from __future__ import annotations

from memopt.estimators.onnx.match.view import View
from memopt.estimators.onnx.read.graph import Node

_KINDS = ("LSTM", "GRU", "RNN")
_BETWEEN = ("Dropout", "Reshape", "Squeeze", "Transpose")
_OWN = (1, 2, 3, 5, 6)
"""Inputs of a layer beside the sequence: weights, recurrent weights, biases and first states."""


def stacked(view: View, node: Node) -> Node | None:
    """The top layer of a stack, with the layers below it: the sequence, then five inputs a layer, the lowest first."""
    if node.op not in _KINDS or node.domain:
        return None
    layers, ratio = [node], 0.0
    while (found := _below(view, layers[0])) is not None:
        layers.insert(0, found[0])
        ratio = max(ratio, found[1])
    others = (_below(view, other) for other in view.graph.nodes if other.op == node.op)
    if len(layers) == 1 or any(found is not None and found[0] is node for found in others):
        return None
    own = [layer.inputs[i] if i < len(layer.inputs) else "" for layer in layers for i in _OWN]
    attributes = {**node.attributes, "kind": node.op, "layers": len(layers), "ratio": ratio}
    return Node("Stack", "memopt", (layers[0].inputs[0], *own), node.outputs, attributes, node.name)


def _below(view: View, node: Node) -> tuple[Node, float] | None:
    """The layer whose output `node` reads, and the dropout between them."""
    name, inside, ratio = node.inputs[0], set[str](), 0.0
    while (between := view.maker(name, *_BETWEEN)) is not None:
        inside.add(name)
        if between.op == "Dropout":
            ratio = (view.scalar(between.inputs[1]) or 0.0) if len(between.inputs) > 1 else 0.5
        name = between.inputs[0]
    layer = view.maker(name, node.op)
    if layer is None or name != layer.outputs[0] or not view.closed({*inside, *layer.outputs} - {""}, node):
        return None
    alike = layer.attributes == node.attributes and _given(layer) == _given(node)
    plain = not _given(node)[1] and node.attributes.get("direction") != "reverse"
    return (layer, ratio) if alike and plain and _module(layer) == _module(node) != "" else None


def _given(node: Node) -> list[bool]:
    """Whether a layer has biases, lengths and first states."""
    return [i < len(node.inputs) and bool(node.inputs[i]) for i in (3, 4, 5, 6)]


def _module(node: Node) -> str:
    """Of the script, as an exporter of torch writes it down or into the node's name."""
    return node.scope or node.name.rpartition("/")[0]
