"""What is done with an operator that is not in the registry: shapes by onnx's inference, memory by a pessimist's rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.estimators.onnx.read.graph import Node, Weight

Inferred = list[tuple[tuple[int, ...], int]]
Make = Callable[[tuple[int, ...], torch.dtype], Tensor]


def infer_outputs(node: Node, inputs: list[Any], known: list[Tensor | None], opset: int) -> Inferred | None:
    """Shape and ONNX element type of each output by `onnx.shape_inference`, or None when it does not know."""
    import onnx
    from onnx import helper, shape_inference

    if node.domain or not onnx.defs.has(node.op):
        return None
    names = [f"in{i}" if isinstance(v, Tensor) else "" for i, v in enumerate(inputs)]
    outputs = [f"out{i}" if name else "" for i, name in enumerate(node.outputs)]
    try:
        attributes = {k: v for k, v in node.attributes.items() if not isinstance(v, Weight) and v is not None}
        one = helper.make_node(node.op, names, outputs, **attributes)
        ports = [
            helper.make_tensor_value_info(n, _kind(v), list(v.shape))
            for n, v in zip(names, inputs, strict=True)
            if n
        ]
        weights = [
            helper.make_tensor(n, _kind(v), list(v.shape), v.reshape(-1).tolist())
            for n, v in zip(names, known, strict=True)
            if n and v is not None and v.numel() <= 4096
        ]
        results = [helper.make_empty_tensor_value_info(o) for o in outputs if o]
        graph = helper.make_graph([one], "one", ports, results, weights)
        most = onnx.defs.onnx_opset_version()
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", min(opset, most))])
        inferred = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except Exception:  # onnx raises InferenceError, ValueError, TypeError, ... for what it cannot take
        return None
    found = {v.name: v.type.tensor_type for v in (*inferred.graph.output, *inferred.graph.value_info)}
    out: Inferred = []
    for name in outputs:
        tensor = found.get(name)
        if not name:
            out.append(((0,), 1))
            continue
        if tensor is None or not tensor.HasField("shape"):
            return None
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        if min(dims, default=0) < 0:
            return None
        out.append((tuple(dims), tensor.elem_type))
    return out


def _kind(tensor: Tensor) -> int:
    from memopt.estimators.onnx.ops.registry import DTYPES

    return next(kind for kind, dtype in DTYPES.items() if dtype == tensor.dtype)


class _Opaque(torch.autograd.Function):
    """Keeps all its inputs and outputs for backward, and gives every input a gradient."""

    @staticmethod
    def forward(
        ctx: Any, make: Make, made: list[tuple[tuple[int, ...], torch.dtype]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = tuple(make(shape, kind) for shape, kind in made)
        ctx.save_for_backward(*inputs, *outputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        ctx.count = len(inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = ctx.saved_tensors[: ctx.count]
        needs = ctx.needs_input_grad[2:]
        return None, None, *(torch.empty_like(t) if n else None for t, n in zip(inputs, needs, strict=True))


def opaque(
    made: list[tuple[tuple[int, ...], torch.dtype]], inputs: list[Any], make: Make
) -> tuple[Tensor, ...]:
    """Outputs of the given shapes from `make`, tied to `inputs` in autograd's graph."""
    tensors = [t for v in inputs for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]
    outputs: tuple[Tensor, ...] = _Opaque.apply(make, made, *tensors)  # type: ignore[no-untyped-call]
    return outputs
