"""ONNX operators that choose, repeat, draw at random, and hold sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.estimators.fake.torch_internals import FakeTensor
from memopt.estimators.onnx.ops.registry import Call, Malformed, numbers_of, op, positive
from memopt.estimators.onnx.read.graph import Graph

MOST_TURNS = 100_000


@op("If")
def if_(call: Call) -> Any:
    """The branch that a known condition takes; with an unknown one the branch with more nodes, and that is said."""
    branches = call.graph("then_branch"), call.graph("else_branch")
    if call.known[0] is not None:
        graph = branches[0] if bool(call.scalar(0)) else branches[1]
    else:
        graph = max(branches, key=lambda g: len(g.nodes))
        call.run.partial.setdefault("If", "its condition depends on data; the larger branch was taken")
    return tuple(call.run.graph(graph, call.env, {}))


@op("Loop")
def loop(call: Call) -> Any:
    """As often as the known trip count and condition say; once when either depends on data, and that is said."""
    body = call.graph("body")
    turns = MOST_TURNS
    if call.has(0):
        turns = int(call.scalar(0)) if call.known[0] is not None else _once(call, "its trip count")
    if call.has(1) and call.known[1] is not None and not bool(call.scalar(1)):
        turns = 0
    carried = [k if k is not None else v for k, v in zip(call.known[2:], call.inputs[2:], strict=True)]
    count = len(carried)
    _check(call, body, 2 + count)
    collected: list[list[Tensor]] = [[] for _ in body.outputs[1 + count :]]
    turn = 0
    while turn < turns:
        call.run.count()
        fed = [call.run.real(torch.int64, turn), call.run.real(torch.bool, True), *carried]
        given = dict(zip((p.name for p in body.inputs), fed, strict=True))
        going, *results = call.run.graph(body, call.env, given)
        carried = results[:count]
        for kept, value in zip(collected, results[count:], strict=True):
            kept.append(value)
        turn += 1
        if isinstance(going, Tensor) and not isinstance(going, FakeTensor):
            if not bool(numbers_of(going)[0]):
                break
        elif not call.has(0):
            _once(call, "its condition")
            break
    return (*carried, *(_stacked(c) for c in collected))


def _once(call: Call, what: str) -> int:
    call.run.partial.setdefault("Loop", f"{what} depends on data; it was run once")
    return 1


def _check(call: Call, body: Graph, inputs: int) -> None:
    if len(body.inputs) != inputs:
        raise Malformed(f"its body takes {len(body.inputs)} values and is given {inputs}")


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values) if values else torch.empty(0)


@op("Scan")
def scan(call: Call) -> Any:
    body, scanned = call.graph("body"), call.number("num_scan_inputs", 1)
    if not 1 <= scanned <= len(call.inputs):
        raise Malformed(f"it scans {scanned} of {len(call.inputs)} inputs")
    split = len(call.inputs) - scanned
    state = list(call.inputs[:split])
    axes = call.numbers("scan_input_axes") or [0] * scanned
    over = [call.tensor(split + i) for i in range(scanned)]
    _check(call, body, len(call.inputs))
    collected: list[list[Tensor]] = [[] for _ in body.outputs[split:]]
    length = over[0].shape[positive(axes[0], over[0].dim())]
    for turn in range(length):
        call.run.count()
        fed = [*state, *(x.select(a, turn) for x, a in zip(over, axes, strict=True))]
        given = dict(zip((p.name for p in body.inputs), fed, strict=True))
        results = call.run.graph(body, call.env, given)
        state = results[:split]
        for kept, value in zip(collected, results[split:], strict=True):
            kept.append(value)
    return (*state, *(_stacked(c) for c in collected))


@op("RandomNormal", "RandomUniform")
def random(call: Call) -> Tensor:
    return torch.empty(call.numbers("shape") or [], dtype=call.run.dtype(call.number("dtype", 1)))


@op("RandomNormalLike", "RandomUniformLike", "Bernoulli")
def random_like(call: Call) -> Tensor:
    kind = call.attribute("dtype")
    return torch.empty_like(call.tensor(0), dtype=None if kind is None else call.run.dtype(kind))


@op("Multinomial")
def multinomial(call: Call) -> Tensor:
    kind = call.run.dtype(call.number("dtype", 6))
    return torch.empty(call.tensor(0).shape[0], call.number("sample_size", 1), dtype=kind)


@op("SequenceConstruct")
def sequence_construct(call: Call) -> list[Tensor]:
    return call.tensors()


@op("SequenceEmpty")
def sequence_empty(call: Call) -> list[Tensor]:
    return []


@op("SequenceAt")
def sequence_at(call: Call) -> Tensor:
    return call.sequence(0)[int(call.scalar(1))]


@op("SequenceLength")
def sequence_length(call: Call) -> Tensor:
    return call.run.real(torch.int64, len(call.sequence(0)))


@op("SequenceInsert")
def sequence_insert(call: Call) -> list[Tensor]:
    items = list(call.sequence(0))
    items.insert(int(call.scalar(2)) if call.has(2) else len(items), call.tensor(1))
    return items


@op("SequenceErase")
def sequence_erase(call: Call) -> list[Tensor]:
    items = list(call.sequence(0))
    del items[int(call.scalar(1)) if call.has(1) else -1]
    return items


@op("ConcatFromSequence")
def concat_from_sequence(call: Call) -> Tensor:
    join = torch.stack if call.number("new_axis", 0) else torch.cat
    return join(call.sequence(0), call.number("axis", 0))


@op("Optional", "OptionalGetElement")
def optional(call: Call) -> Any:
    return call.inputs[0] if call.inputs else None


@op("OptionalHasElement")
def optional_has_element(call: Call) -> Tensor:
    return call.run.real(torch.bool, call.has(0))
