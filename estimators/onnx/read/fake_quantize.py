"""QuantizeLinear and the DequantizeLinear that undoes it, joined: the fake quantisation of quantisation-aware training.

Apart, the two would cut the gradient, since integers carry none; a script's `torch.fake_quantize_*` passes it through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memopt.estimators.onnx.read.graph import Graph, Node, subgraphs

_STANDARD = ("", "com.microsoft")


def with_fake_quantization(graph: Graph) -> Graph:
    """`graph` with every such pair as one node, in its branches and bodies too."""
    makers = {o: n for n in graph.nodes for o in n.outputs if o}
    nodes = tuple(_joined(node, makers) or _inside(node) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def _joined(node: Node, makers: Mapping[str, Node]) -> Node | None:
    if node.op != "DequantizeLinear" or node.domain not in _STANDARD or not node.inputs:
        return None
    made = makers.get(node.inputs[0])
    if made is None or made.op != "QuantizeLinear" or made.domain not in _STANDARD:
        return None
    return Node(
        "FakeQuantize", "memopt", made.inputs[:2], node.outputs, node.attributes, node.name, node.scope
    )


def _inside(node: Node) -> Node:
    if not any(True for _ in subgraphs(node)):
        return node
    inner = {k: with_fake_quantization(v) if isinstance(v, Graph) else v for k, v in node.attributes.items()}
    return dataclasses.replace(node, attributes=inner)
