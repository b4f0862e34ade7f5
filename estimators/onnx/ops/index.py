"""ONNX operators that pick elements and put them: by index, by mask, by value. Sizes that depend on data are bounded."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.estimators.onnx.ops.registry import Call, Malformed, op, positive


@op("Gather")
def gather(call: Call) -> Tensor:
    """A known single index is a view, as `x[:, 0]` is; rows of a matrix are an embedding; else an index_select."""
    x, indices = call.tensor(0), call.tensor(1)
    axis = positive(call.number("axis", 0), x.dim())
    known = call.known[1]
    if known is not None and known.numel() == 1:
        one = x.select(axis, int(call.scalar(1)))
        return one.reshape(x.shape[:axis] + known.shape + x.shape[axis + 1 :]) if known.dim() else one
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(indices.long(), x)
    picked = x.index_select(axis, indices.reshape(-1).long())
    return picked.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


@op("GatherElements")
def gather_elements(call: Call) -> Tensor:
    return torch.gather(call.tensor(0), call.number("axis", 0), call.tensor(1).long())


@op("GatherND")
def gather_nd(call: Call) -> Tensor:
    x, indices = call.tensor(0), call.tensor(1).long()
    batch = call.number("batch_dims", 0)
    if batch:
        lead = math.prod(x.shape[:batch])
        x = x.reshape(lead, *x.shape[batch:])
        depth = indices.shape[-1]
        rows = torch.arange(lead, device=x.device).reshape(-1, *[1] * (indices.dim() - batch - 1))
        columns = indices.reshape(lead, *indices.shape[batch:]).unbind(-1)[:depth]
        picked = x[(rows, *columns)]
        return picked.reshape(*indices.shape[:batch], *picked.shape[1:])
    return x[tuple(indices.unbind(-1))]


@op("ScatterElements", "Scatter", "ScatterND")
def scatter(call: Call) -> Tensor:
    x, indices, updates = call.tensor(0), call.tensor(1).long(), call.tensor(2)
    updates = updates.to(x.dtype)
    reduction = call.attribute("reduction", "none")
    if call.node.op == "ScatterND":
        return x.index_put(tuple(indices.unbind(-1)), updates, accumulate=reduction == "add")
    axis = call.number("axis", 0)
    if reduction == "none":
        return torch.scatter(x, axis, indices, updates)
    named = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}.get(reduction)
    if named is None:
        raise Malformed(f"it reduces by '{reduction}'")
    return torch.scatter_reduce(x, axis, indices, updates, named)


@op("TensorScatter")
def tensor_scatter(call: Call) -> Tensor:
    return call.tensor(0).clone()


@op("OneHot")
def one_hot(call: Call) -> Tensor:
    indices, depth, values = call.tensor(0), int(call.scalar(1)), call.tensor(2)
    axis = positive(call.number("axis", -1), indices.dim() + 1)
    off, on = values[0], values[1]
    places = torch.arange(depth)
    hits = indices.long().remainder(depth).unsqueeze(-1) == places
    return torch.where(hits, on, off).movedim(-1, axis)


@op("NonZero")
def non_zero(call: Call) -> Tensor:
    """With known values exact; else the bound: every element counts."""
    x = call.tensor(0)
    if call.known[0] is not None:
        known = call.value(0)
        return call.run.outside(lambda: torch.nonzero(known).t().contiguous())
    return torch.empty(max(x.dim(), 1), call.run.bound(call.node, x.numel()), dtype=torch.int64)


@op("Compress")
def compress(call: Call) -> Tensor:
    x = call.tensor(0)
    axis = call.attribute("axis")
    if call.known[1] is not None:
        picked = call.run.outside(lambda: call.value(1).nonzero().reshape(-1))
        return x.reshape(-1)[picked] if axis is None else x.index_select(axis, picked.to(x.device))
    along = 0 if axis is None else positive(axis, x.dim())
    whole = x.reshape(-1) if axis is None else x
    return whole.narrow(along, 0, call.run.bound(call.node, whole.shape[along])).clone()


@op("Unique")
def unique(call: Call) -> tuple[Tensor, ...]:
    x = call.tensor(0)
    axis = call.attribute("axis")
    along = 0 if axis is None else positive(axis, x.dim())
    whole = x.reshape(-1) if axis is None else x
    length = whole.shape[along]
    count = call.run.bound(call.node, length)
    values = whole.narrow(along, 0, count).clone()
    return values, *(torch.empty(n, dtype=torch.int64) for n in (count, length, count))


@op("NonMaxSuppression")
def non_max_suppression(call: Call) -> Tensor:
    scores = call.tensor(1)
    most = (
        min(int(call.scalar(2)), scores.shape[2])
        if call.has(2) and call.known[2] is not None
        else scores.shape[2]
    )
    picked = call.run.bound(call.node, scores.shape[0] * scores.shape[1] * most)
    return torch.empty(picked, 3, dtype=torch.int64)
