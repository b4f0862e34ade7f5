"""What an exporter took out of the training graph: batch norms folded into convolutions, dropouts dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memopt.estimators.onnx.graph import Graph, Node, Weight
from memopt.estimators.onnx.parameters import made_up

_NORMS = {
    "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization",
    "MeanVarianceNormalization", "RMSNormalization",
}  # fmt: skip


_DROPS = {"Attention", "GRU", "Gemm", "LSTM", "Linear", "MatMul"}
"""Where scripts put dropouts: networks with one such layer at most are not suspected of having had any."""


def folded_batch_norms(graph: Graph) -> list[Node]:
    """Convolutions that have, or look as if they had, a batch norm folded into them.

    torch.onnx writes down from which module a node came: a convolution that came from a batch norm is one for certain.
    Elsewhere, in a graph of several convolutions and no normalisation at all, those are suspected that have no bias (as
    one writes them before a norm) or one that has not the name which a module gives it (folding leaves such a bias).
    """
    convolutions = [n for n in graph.nodes if n.op in ("Conv", "ConvTranspose") and len(n.inputs) > 1]
    certain = [n for n in convolutions if "batchnorm" in n.origin.lower()]
    if certain or len(convolutions) < 2 or any(n.op in _NORMS for n in graph.nodes):
        return certain
    return [n for n in convolutions if not _has_bias(n) or _left_by_folding(n.inputs[1], n.inputs[2])]


def _has_bias(node: Node) -> bool:
    return len(node.inputs) > 2 and bool(node.inputs[2])


def _left_by_folding(weight: str, bias: str) -> bool:
    """Whether the bias has not the name that a module would give it beside its weight."""
    return made_up(bias) or bias != weight.removesuffix("weight") + "bias"


def assume_batch_norms(graph: Graph, convolutions: list[Node]) -> tuple[Graph, dict[str, Weight]]:
    """`graph` with a batch norm after each of `convolutions` in place of its bias, and the weights that this adds."""
    wanted = {n.outputs[0] for n in convolutions}
    weights = dict(graph.weights)
    added: dict[str, Weight] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if not node.outputs or node.outputs[0] not in wanted:
            nodes.append(node)
            continue
        out, before = node.outputs[0], f"{node.outputs[0]}/before_bn"
        channels = _channels(node, weights)
        kind = weights[node.inputs[1]].kind if node.inputs[1] in weights else 1
        names = [f"{out}/bn.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        for name in names:
            weights[name] = Weight(name, kind, (channels,))
        added.update({n: weights[n] for n in names[:2]})
        nodes.append(dataclasses.replace(node, inputs=node.inputs[:2], outputs=(before, *node.outputs[1:])))
        nodes.append(
            Node("BatchNormalization", "", (before, *names), (out,), {}, f"{node.name}/bn", node.scope)
        )
    return dataclasses.replace(graph, nodes=tuple(nodes), weights=weights), added


def _channels(node: Node, weights: Mapping[str, Weight]) -> int:
    """How many channels a convolution gives out."""
    kernel = weights[node.inputs[1]].dims if node.inputs[1] in weights else (1, 1)
    groups = node.attributes.get("group", 1)
    return kernel[0] if node.op == "Conv" else kernel[1] * (groups if isinstance(groups, int) else 1)


def warnings(graph: Graph, trained: Mapping[str, Weight], assumed: int) -> list[str]:
    """What must be said about the graph as a training graph."""
    said: list[str] = []
    suspects = folded_batch_norms(graph)
    if assumed:
        said.append(f"a batch norm was assumed after {assumed} convolutions (--assume-bn)")
    elif suspects:
        said.append(
            f"batch norm was folded into {len(suspects)} convolutions when the file was exported: in training each keeps one "
            "more activation, so this estimate is too low (--assume-bn adds them; or export with optimize=False in train mode)"
        )
    products = [n for n in graph.nodes if n.op in _DROPS]
    if len(products) > 1 and not any(n.op == "Dropout" for n in graph.nodes):
        said.append(
            "the file has no Dropout: exporters drop it outside train mode; if the script trains with it, its masks "
            "(1 byte an element on a GPU) and outputs are missing here"
        )
    return said


def lost_dropout(graph: Graph) -> list[str]:
    """What must be said of attention that lost its dropout, in a matched graph that has kept others."""
    attention = [n for n in graph.nodes if n.op == "Attention"]
    if not any(n.op == "Dropout" for n in graph.nodes) or any(n.attributes.get("ratio") for n in attention):
        return []
    return [
        "the file has dropouts, but none in its attention: torch.onnx.export drops that one unless optimize=False; if the script "
        "trains with it, a CPU keeps matrices of attention that are missing here (a GPU's kernels need none)"
        for _ in attention[:1]
    ]
