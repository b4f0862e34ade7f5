"""The shapes of a recorded op's operands, in the order that flop formulas want, from what a trace keeps: sizes and labels.

A trace says which storages an op reads, not in which order nor through which view. For a product that is enough: its flops
follow from the three sizes. Where a storage is larger than the view that was read (one of three chunks), they come out too high.
"""

from __future__ import annotations

import math

from memopt.estimators.elsewhere.batch import label_shape
from memopt.estimators.elsewhere.op_time import ITEM_BYTES, OpCall, TensorShape
from memopt.trace import CATEGORIES, Trace

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
_FIXED = frozenset(CATEGORIES.index(name) for name in ("parameter", "buffer"))


def tensor_of(trace: Trace, storage: int) -> TensorShape:
    """The first tensor of the storage; flat, of its bytes, where the label tells no shape."""
    label, size = trace.storage_label(storage), trace.storages.size_bytes[storage]
    shape, word = label_shape(label), label.rpartition(" ")[2]
    dtype = _DTYPES.get(word, word)
    if shape is None or dtype not in ITEM_BYTES or math.prod(shape) * ITEM_BYTES[dtype] != size:
        known = dtype if dtype in ITEM_BYTES else "uint8"
        return TensorShape((size // ITEM_BYTES[known],), known)
    return TensorShape(shape, dtype)


def op_call(trace: Trace, op: int) -> OpCall:
    """The op with its operands, for `op_time_ms`."""
    storage_of, kinds = trace.values.storage, trace.storages.category
    read = list(dict.fromkeys(storage_of[value] for value in trace.ops.reads.row(op)))
    written = list(dict.fromkeys(storage_of[value] for value in trace.ops.writes.row(op)))
    read.sort(key=lambda s: (kinds[s] in _FIXED, -trace.storages.size_bytes[s]))
    call = OpCall(
        trace.op_name(op), [tensor_of(trace, s) for s in read], [tensor_of(trace, s) for s in written]
    )
    name = call.base_name
    if "convolution" in name or name.startswith("conv"):
        return _convolution(call)
    if "scaled_dot_product" in name:
        return _attention(call)
    return _product(call) if name in _PRODUCTS else call


_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "matmul": 0,
    "mv": 0,
    "dot": 0,
    "addmm": 1,
    "baddbmm": 1,
    "addbmm": 1,
    "addmv": 1,
}
"""How many operands come before the two that are multiplied. (`linear` never reaches the recorder.)"""


def _product(call: OpCall) -> OpCall:
    """From |a| = b·m·k, |c| = b·k·n and |out| = b·m·n: b·m·k·n = √(|a|·|c|·|out| / b), whatever their views."""
    if not call.outputs or not call.inputs:
        return call
    large = sorted(call.inputs, key=lambda t: -t.elements)[:2]
    left, right = large[0], large[-1]  # a matrix times itself is one storage
    out = call.outputs[0]
    batch = out.shape[0] if len(out.shape) == 3 and "b" in call.base_name[:3] else 1
    rows = math.prod(out.shape[1:-1] if batch > 1 else out.shape[:-1]) or 1
    columns = out.shape[-1] if out.shape else 1
    depth = round(math.sqrt(left.elements * right.elements / (max(out.elements, 1) * batch))) or 1
    lead = (batch,) if batch > 1 else ()
    operands = [
        TensorShape((*lead, rows, depth), left.dtype),
        TensorShape((*lead, depth, columns), right.dtype),
    ]
    bias = [TensorShape((columns,), out.dtype)] * _PRODUCTS[call.base_name]
    return OpCall(call.name, [*bias, *operands], [TensorShape((*lead, rows, columns), out.dtype)])


def _convolution(call: OpCall) -> OpCall:
    """input, weight, bias; backward: output gradient, input, weight. The weight is what is read last of those with its rank.

    What has as many channels as the weight has rows is the output (of a transposed one the input), on whose positions each
    row is applied: that is all that the flops need, so that backward does not tell the two apart.
    """
    rank = max((len(t.shape) for t in (*call.inputs, *call.outputs)), default=0)
    spatial = [t for t in call.inputs if len(t.shape) == rank]
    if rank < 3 or len(spatial) < 2 or not call.outputs:
        return call
    weight = spatial[-1]
    others = spatial[:-1]
    if "backward" in call.base_name:
        flat = [
            t for t in call.inputs if len(t.shape) != rank
        ]  # the output gradient may be a view of a matrix
        if len(others) == 1 and flat:
            outer, inner = max(flat, key=lambda t: t.elements), others[0]
        else:
            outer = min(others, key=lambda t: (t.shape[1] != weight.shape[0], t.elements))
            inner = next((t for t in others if t is not outer), outer)
        gradients = sum(len(t.shape) == rank for t in call.outputs)
        arguments = {"output_mask": (gradients > 1, gradients > 0, False), "groups": _groups(inner, weight)}
        return OpCall(call.name, [outer, inner, weight], call.outputs, arguments)
    source, made = others[0], call.outputs[0]
    forward = len(made.shape) != rank or made.shape[1] == weight.shape[0]
    transposed = source.shape[1] == weight.shape[0] and (not forward or source.elements < made.elements)
    arguments = {"transposed": transposed, "groups": 1 if transposed else _groups(source, weight)}
    return OpCall(call.name, [source, weight], call.outputs, arguments)


def _groups(source: TensorShape, weight: TensorShape) -> int:
    return max(1, source.shape[1] // max(weight.shape[1], 1))


def _attention(call: OpCall) -> OpCall:
    """query, key and value as the largest result: (batch, heads, length, dim), of one length."""
    four = [t for t in (*call.outputs, *call.inputs) if len(t.shape) == 4]
    if not four:
        return call
    like = max(four, key=lambda t: t.elements) if "backward" in call.base_name else four[0]
    return OpCall(call.name, [like] * (5 if "backward" in call.base_name else 3), call.outputs)
