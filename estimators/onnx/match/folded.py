"""What an exporter took out of the training graph: batch norms folded into convolutions, dropouts dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memopt.estimators.onnx.read.graph import Graph, Node, Weight
from memopt.estimators.onnx.read.parameters import made_up

_NORMS = {
    "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization",
    "MeanVarianceNormalization", "RMSNormalization",
}  # fmt: skip


_DROPS = {"Attention", "GRU", "Gemm", "LSTM", "Linear", "MatMul"}
"""Where scripts put dropouts: networks with one such layer at most are not suspected of having had any."""


_SHAPES = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
_AT_THE_END = {"LogSoftmax", "Resize", "Sigmoid", "Softmax", "Tanh", "Upsample"}
"""What may stand between a network's last convolution and its output."""
_ACTIVATIONS = {
    "Celu", "Clip", "Div", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu",
    "Sigmoid", "Softplus", "Swish", "Tanh",
}  # fmt: skip
"""`Div` begins a GELU that was taken apart."""


def folded_batch_norms(graph: Graph) -> list[Node]:
    """Convolutions that have, or look as if they had, a batch norm folded into them.

    torch.onnx writes down from which module a node came: a convolution that came from a batch norm is one for certain, and
    then there are no others. Elsewhere the names tell: folding leaves weight and bias that are not called as a module
    calls them. Not suspected are convolutions that a norm, a change of shape (patches) or the output follows. In a graph
    of one convolution, or with norms of its own, an activation must follow one of them, as it does in every network of
    convolutions and batch norms; in others those without a bias are suspected too, as one writes them before a norm.
    """
    convolutions = [n for n in graph.nodes if n.op in ("Conv", "ConvTranspose") and len(n.inputs) > 1]
    certain = [n for n in convolutions if _is_certain(n)]
    if certain:
        return certain
    readers = _readers(graph)
    plain = len(convolutions) > 1 and not any(n.op in _NORMS for n in graph.nodes)
    found = [n for n in convolutions if _is_suspect(n, plain) and not _leads_elsewhere(n, graph, readers)]
    active = any(reader.op in _ACTIVATIONS for n in found for reader in readers.get(n.outputs[0], ()))
    return found if plain or active else []


def _is_certain(node: Node) -> bool:
    return "batchnorm" in node.origin.lower()


def _is_suspect(node: Node, plain: bool) -> bool:
    if not (len(node.inputs) > 2 and node.inputs[2]):
        return plain and not node.origin
    weight, bias = node.inputs[1:3]
    if node.origin:  # of a convolution: only a tool that came later can have folded one into it
        return made_up(weight) and made_up(bias)
    return made_up(bias) or bias != weight.removesuffix("weight") + "bias"


def _readers(graph: Graph) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            found.setdefault(name, []).append(node)
    return found


def _leads_elsewhere(node: Node, graph: Graph, readers: Mapping[str, list[Node]]) -> bool:
    """Whether a norm, another shape or the graph's output follows, where no batch norm would have been."""
    name = node.outputs[0]
    following = readers.get(name, [])
    if any(n.op in _NORMS or (n.op in _SHAPES and n.op not in ("Cast", "Identity")) for n in following):
        return True
    while name not in graph.outputs:
        if len(following) != 1 or following[0].op not in _SHAPES | _AT_THE_END:
            return False
        name = following[0].outputs[0]
        following = readers.get(name, [])
    return True


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


def seen_by(suspects: list[Node]) -> str:
    """How sure it is that batch norms were folded into `suspects`, as words to be added."""
    return "" if any(map(_is_certain, suspects)) else ", it seems by their names"


def assumed_batch_norms(assumed: int, seen: str) -> list[str]:
    """What must be said of batch norms that were `assumed` after so many convolutions."""
    if not assumed:
        return []
    return [
        f"batch norm was folded into {assumed} convolutions when the file was exported{seen}: one was assumed after each, as "
        "training keeps it (--no-assume-bn leaves them out; or export with optimize=False in train mode)"
    ]


def missing(graph: Graph, assumed: int) -> list[str]:
    """What training may keep and the graph does not show, with batch norms `assumed` after so many convolutions."""
    said: list[str] = []
    suspects = folded_batch_norms(graph)
    if suspects and not assumed:
        said.append(
            f"batch norm was folded into {len(suspects)} convolutions when the file was exported{seen_by(suspects)}: in training "
            "each keeps one more activation (--assume-bn adds them)"
        )
    products = [n for n in graph.nodes if n.op in _DROPS]
    if len(products) > 1 and not any(n.op == "Dropout" for n in graph.nodes):
        said.append(
            "the file has no Dropout, which exporters drop outside train mode: if the script trains with it, its masks "
            "(1 byte an element on a GPU), its outputs, and on a CPU the matrices of attention"
        )
    return said


def lost_dropout(graph: Graph) -> list[str]:
    """What is missing on a CPU of attention that lost its dropout, in a matched graph that has kept others. A GPU's kernels keep no such matrices."""
    attention = [n for n in graph.nodes if n.op == "Attention"]
    if not any(n.op == "Dropout" for n in graph.nodes) or any(n.attributes.get("ratio") for n in attention):
        return []
    return [
        "the file has dropouts, but none in its attention, which torch.onnx.export drops unless optimize=False: if the script "
        "trains with it, the matrices of attention"
        for _ in attention[:1]
    ]
