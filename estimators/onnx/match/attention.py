"""Decomposed attention found again: softmax(scale * q @ k^T + mask) @ v becomes `scaled_dot_product_attention`."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.estimators.onnx.match.view import View, is_bool
from memopt.estimators.onnx.ops.registry import numbers_of
from memopt.estimators.onnx.read.graph import Node


@dataclass(slots=True)
class _Scores:
    """The matrix before the softmax: product, mask and what lies between."""

    product: Node
    mask: str = ""
    inside: set[str] = field(default_factory=set)


def attention(view: View, node: Node) -> Node | None:
    """The MatMul of softmaxed scores and values, with all that leads to it, as one operator."""
    if node.op != "MatMul":
        return None
    inside: set[str] = set()
    weights, ratio = _through_dropout(view, node.inputs[0], inside)
    softmax = _through_nan_guard(view, weights, inside)
    if softmax is None or not _over_keys(view, softmax):
        return None
    inside.add(softmax.outputs[0])
    scores = _scores(view, softmax.inputs[0])
    if scores is None:
        return None
    inside |= scores.inside
    if not view.closed(inside, node):
        return None
    q, q_scaled = _unscaled(view, scores.product.inputs[0], inside)
    turned, k_scaled = _unscaled(view, scores.product.inputs[1], inside)
    if view.from_torch and not node.call and not (q_scaled and k_scaled):
        return None  # written by hand: F.scaled_dot_product_attention is exported with both of them scaled
    return _fused(view, node, q, turned, scores.mask, ratio)


def _fused(view: View, node: Node, q: str, turned: str, mask: str, ratio: float) -> Node | None:
    k, already = _keys(view, turned)
    shapes = view.shape(q), view.shape(turned), view.shape(node.inputs[1])
    if any(s is None or len(s) < 3 for s in shapes):
        return None
    causal = bool(mask) and _is_causal(view, mask)
    inputs = (q, k, node.inputs[1], "" if causal else mask)
    attributes = {"causal": int(causal), "ratio": ratio, "turned": int(not already)}
    return Node("Attention", "memopt", inputs, node.outputs, attributes, node.name)


def _through_dropout(view: View, name: str, inside: set[str]) -> tuple[str, float]:
    drop = view.maker(name, "Dropout")
    if drop is None:
        return name, 0.0
    inside.add(name)
    given = view.scalar(drop.inputs[1]) if len(drop.inputs) > 1 and drop.inputs[1] else None
    return drop.inputs[0], drop.attributes.get("ratio", 0.5) if given is None else given


def _through_nan_guard(view: View, name: str, inside: set[str]) -> Node | None:
    """The softmax itself, or under Where(IsNaN(softmax), 0, softmax), which masked rows are guarded with."""
    guard = view.maker(name, "Where")
    if guard is not None:
        test = view.maker(guard.inputs[0], "IsNaN")
        if test is None or test.inputs[0] != guard.inputs[2]:
            return None
        inside |= {name, guard.inputs[0]}
        name = guard.inputs[2]
    cast = view.maker(name, "Cast")
    if cast is not None:
        inside.add(name)
        name = cast.inputs[0]
    return view.maker(name, "Softmax")


def _over_keys(view: View, softmax: Node) -> bool:
    shape = view.shape(softmax.outputs[0])
    default = -1 if view.opset >= 13 else 1
    return shape is not None and softmax.attributes.get("axis", default) in (-1, len(shape) - 1)


def _scores(view: View, name: str) -> _Scores | None:
    """From the softmax's input down to the product: scales, casts and at most two masks."""
    inside: set[str] = set()
    mask = ""
    for _ in range(6):
        inside.add(name)
        node = view.makers.get(name)
        if node is None:
            return None
        if node.op == "MatMul":
            return _Scores(node, mask, inside)
        if node.op in ("Cast", "Identity"):
            name = node.inputs[0]
        elif node.op in ("Mul", "Div") and (step := _scalar_side(view, node)) is not None:
            name = step
        elif node.op in ("Add", "Where") and not mask and (step2 := _masked(view, node)) is not None:
            name, mask = step2
        else:
            return None
    return None


def _scalar_side(view: View, node: Node) -> str | None:
    """The other input of a multiplication by a number."""
    if node.op == "Div":
        return node.inputs[0] if view.scalar(node.inputs[1]) is not None else None
    for x, factor in view.either(node):
        if view.scalar(factor) is not None:
            return x
    return None


def _masked(view: View, node: Node) -> tuple[str, str] | None:
    """(scores, mask) of an added or a chosen mask."""
    if node.op == "Where":
        condition, a, b = node.inputs
        if view.scalar(a) is not None:
            return b, condition
        return (a, condition) if view.scalar(b) is not None else None
    shape = view.shape(node.outputs[0])
    for scores, mask in view.either(node):
        if view.shape(scores) == shape and _leads_to_product(view, scores):
            return scores, mask
    return None


def _leads_to_product(view: View, name: str) -> bool:
    for _ in range(4):
        node = view.maker(name, "MatMul", "Mul", "Div", "Cast")
        if node is None:
            return False
        if node.op == "MatMul":
            return True
        step = node.inputs[0] if node.op == "Cast" else _scalar_side(view, node)
        if step is None:
            return False
        name = step
    return False


def _unscaled(view: View, name: str, inside: set[str]) -> tuple[str, bool]:
    """`name` before it was multiplied by a number, and whether it was."""
    node = view.maker(name, "Mul", "Div")
    step = _scalar_side(view, node) if node is not None else None
    return (step, True) if step is not None else (name, False)


def _keys(view: View, turned: str) -> tuple[str, bool]:
    """The keys before they were transposed (True), when a transposition is all that was done; else `turned` (False)."""
    shape = view.shape(turned)
    if shape is None:
        return turned, False
    wanted = (*shape[:-2], shape[-1], shape[-2])
    node = view.maker(turned, "Transpose", "Reshape")
    if node is not None and node.op == "Transpose":
        perm = node.attributes.get("perm")
        rank = len(shape)
        if perm is not None and tuple(perm) == (*range(rank - 2), rank - 1, rank - 2):
            return node.inputs[0], True
        return turned, False
    if node is not None:  # torch.onnx: Reshape to 3-D, Transpose(0, 2, 1), Reshape back
        swap = view.maker(node.inputs[0], "Transpose")
        flat = view.maker(swap.inputs[0], "Reshape") if swap is not None else None
        turns = swap is not None and tuple(swap.attributes.get("perm", ())) == (0, 2, 1)
        if turns and flat is not None and view.shape(flat.inputs[0]) == wanted:
            return flat.inputs[0], True
    return turned, False


def _is_causal(view: View, mask: str) -> bool:
    """Whether a mask is the triangle: by its values when they are known, else by how it is made."""
    shape = view.shape(mask)
    if shape is None or len(shape) < 2 or shape[-1] != shape[-2] or any(d != 1 for d in shape[:-2]):
        return False
    known = view.known(mask)
    if known is not None:
        return _is_triangle(numbers_of(known), shape[-1], is_bool(known))
    if mask in view.graph.weights:
        return True  # a constant square of which only the shape was read: nothing else is stored like this
    return _made_by_triangle(view, mask, 0)


def _is_triangle(values: list[float], size: int, boolean: bool) -> bool:
    hidden = [[v != values[0] for v in values[i * size : (i + 1) * size]] for i in range(size)]
    return all(hidden[i][j] == (j > i) for i in range(size) for j in range(size)) and (boolean or size > 1)


def _made_by_triangle(view: View, name: str, depth: int) -> bool:
    """Whether a value comes from a Trilu (or a comparison of two ranges) and from no input of the graph."""
    inputs = {p.name for p in view.graph.inputs}
    seen: set[str] = set()
    stack, triangle = [name], False
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        if at in inputs or at in view.trained or len(seen) > 64:
            return False
        node = view.makers.get(at)
        if node is None or view.known(at) is not None:
            continue
        if node.op in ("Trilu", "LessOrEqual", "GreaterOrEqual", "Greater", "Less"):
            triangle = True
        if node.op != "Shape":
            stack += [n for n in node.inputs if n]
    return triangle
