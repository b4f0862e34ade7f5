"""Decomposed layer norm, RMS norm and group norm, found again in a graph."""

from __future__ import annotations

from memopt.estimators.onnx.match.view import View
from memopt.estimators.onnx.read.graph import Node


def layer_norm(view: View, node: Node) -> Node | None:
    """(x - mean) / sqrt(var + eps), then scale and shift where they follow."""
    if node.op != "Add":
        return None
    for scaled, bias in view.either(node):
        product = view.maker(scaled, "Mul")
        if product is None or view.shape(bias) is None:
            continue
        for normal, weight in view.either(product):
            found = _standardised(view, normal)
            if found is None or not _vector(view, weight, found[1]) or not _vector(view, bias, found[1]):
                continue
            x, axis, inside, eps = found
            if view.closed({scaled, normal, *inside}, node):
                return Node(
                    "LayerNormalization",
                    "",
                    (x, weight, bias),
                    node.outputs,
                    {"axis": -axis, "epsilon": eps},
                    node.name,
                )
    return None


def _vector(view: View, name: str, axes: int) -> bool:
    shape = view.shape(name)
    return (
        shape is not None
        and 1 <= len([d for d in shape if d != 1] or [1]) <= axes
        and name in view.graph.weights
    )


def _standardised(view: View, name: str) -> tuple[str, int, set[str], float] | None:
    """`name` as (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps): x, how many last axes, inner names, eps."""
    found = _divided_by_root(view, name)
    if found is None:
        return None
    centred, under, inside = found
    minus = view.maker(centred, "Sub")
    if minus is None:
        return None
    x, average = minus.inputs
    mean = view.maker(average, "ReduceMean")
    spread = _mean_square(view, under)
    if mean is None or mean.inputs[0] != x or spread is None or not view.same(spread[0], centred):
        return None
    axes = _last_axes(view, mean)
    if axes is None:
        return None
    return x, axes, inside | spread[1] | {centred, spread[0], average}, spread[2]


def _divided_by_root(view: View, name: str) -> tuple[str, str, set[str]] | None:
    """`name` as a / sqrt(b) or a * rsqrt(b): a, b, inner names."""
    node = view.maker(name, "Div", "Mul")
    if node is None:
        return None
    if node.op == "Div":
        root = view.maker(node.inputs[1], "Sqrt")
        if root is not None:
            return node.inputs[0], root.inputs[0], {node.inputs[1]}
        power = view.maker(node.inputs[1], "Pow")
        if power is not None and view.scalar(power.inputs[1]) == 0.5:
            return node.inputs[0], power.inputs[0], {node.inputs[1]}
        return None
    for a, factor in view.either(node):
        inverse = view.maker(factor, "Rsqrt", "Pow")
        if inverse is not None and (inverse.op == "Rsqrt" or view.scalar(inverse.inputs[1]) == -0.5):
            return a, inverse.inputs[0], {factor}
    return None


def _mean_square(view: View, name: str) -> tuple[str, set[str], float] | None:
    """`name` as mean(a^2) + eps: a, inner names, eps."""
    plus = view.maker(name, "Add")
    if plus is None:
        return None
    for average, small in view.either(plus):
        eps = view.scalar(small)
        mean = view.maker(average, "ReduceMean")
        if eps is None or mean is None:
            continue
        square = view.maker(mean.inputs[0], "Pow", "Mul")
        if square is None or _last_axes(view, mean) is None:
            continue
        if (square.op == "Mul" and view.same(*square.inputs)) or view.scalar(square.inputs[1]) == 2.0:
            return square.inputs[0], {name, average, mean.inputs[0]}, eps
    return None


def _last_axes(view: View, mean: Node) -> int | None:
    """How many last axes are averaged; None when it is not the last ones or they are dropped."""
    x, y = view.shape(mean.inputs[0]), view.shape(mean.outputs[0])
    if x is None or y is None or len(x) != len(y):
        return None
    gone = [i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b]
    if not gone or gone != list(range(gone[0], len(x))):
        return None
    return len(gone)


def rms_norm(view: View, node: Node) -> Node | None:
    """x / sqrt(mean(x^2) + eps) * weight. From opset 23 a PyTorch exporter writes the fused operator itself; before, it takes
    the norm apart and then writes down the parts' names, but the script's line is still there."""
    if node.op != "Mul" or (view.from_torch and view.opset >= 23):
        return None
    if node.line and "rms_norm(" not in node.line:
        return None
    for position, (normal, weight) in enumerate(view.either(node)):
        if view.from_torch and position == 1:
            return None  # `weight * x`: the way of hand-written ones, never of F.rms_norm
        if not _vector(view, weight, 1):
            continue
        inside = {normal}
        cast = view.maker(normal, "Cast")
        source = cast.inputs[0] if cast is not None else normal
        found = _divided_by_root(view, source)
        spread = _mean_square(view, found[1]) if found is not None else None
        if found is None or spread is None or not view.same(spread[0], found[0]):
            continue
        inside |= found[2] | spread[1] | {source}
        if view.closed(inside, node):
            return Node(
                "RMSNormalization",
                "",
                (found[0], weight),
                node.outputs,
                {"axis": -1, "epsilon": spread[2]},
                node.name,
            )
    return None


def group_norm(view: View, node: Node) -> Node | None:
    """Reshape to groups, InstanceNormalization, Reshape back, scale and shift: how group norm is exported."""
    if node.op != "Add":
        return None
    for scaled, bias in view.either(node):
        product = view.maker(scaled, "Mul")
        if product is None:
            continue
        for normal, weight in view.either(product):
            back = view.maker(normal, "Reshape")
            inner = view.maker(back.inputs[0], "InstanceNormalization") if back else None
            there = view.maker(inner.inputs[0], "Reshape") if inner else None
            if back is None or inner is None or there is None:
                continue
            grouped, shape = view.shape(inner.inputs[0]), view.shape(there.inputs[0])
            if grouped is None or shape is None or shape != view.shape(normal) or len(grouped) < 2:
                continue
            scale, shift = view.tensor(weight), view.tensor(bias)
            if scale is None or shift is None or scale.numel() != shape[1] or shift.numel() != shape[1]:
                continue
            if view.closed({scaled, normal, back.inputs[0], inner.inputs[0]}, node):
                attributes = {"num_groups": grouped[1], "epsilon": inner.attributes.get("epsilon", 1e-5)}
                return Node(
                    "GroupNormalization", "", (there.inputs[0], weight, bias), node.outputs, attributes
                )
    return None
