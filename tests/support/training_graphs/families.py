"""Graphs unlike the models': random ones, deep chains, wide branches, mixtures of experts, accumulated gradients, thousands of tiny ops."""

from __future__ import annotations

import random
from collections.abc import Callable

from memopt.advisors.graphs.graph import SCHEMA, GraphFile, OpRow, TensorRow
from tests.support.training_graphs.tape import LAUNCH_MS, Tape, loss

MB = 2**20


def random_dag(ops: int = 300, seed: int = 0) -> GraphFile:
    """Ops that read what was made recently, and sometimes long ago; some write twice, some run once."""
    rnd = random.Random(seed)
    tensors: list[TensorRow] = []
    rows: list[OpRow] = []
    for _ in range(ops):
        near = list(range(max(0, len(tensors) - 6), len(tensors)))
        reads = set(rnd.sample(near, min(len(near), rnd.choice((1, 1, 2, 3)))))
        if tensors and rnd.random() < 0.5:
            reads.add(rnd.randrange(len(tensors)))
        writes = list(range(len(tensors), len(tensors) + rnd.choice((1, 1, 1, 2))))
        tensors += [TensorRow(id=t, bytes=int(MB * rnd.lognormvariate(1, 1.2))) for t in writes]
        rows.append(
            OpRow(
                ms=round(rnd.lognormvariate(0, 1), 4),
                reads=sorted(reads),
                writes=writes,
                workspace_bytes=rnd.choice((0, 0, MB)),
                replayable=rnd.random() < 0.95,
            )
        )
    return GraphFile(schema=SCHEMA, name=f"random{ops}", tensors=tensors, ops=rows, keep=[len(tensors) - 1])


def _inputs(tape: Tape, size: int) -> int:
    tensor = tape.tensor(size, "inputs")
    tape.op("load", [], [tensor], 0.01, "forward", replayable=False)
    return tensor


def _layer(tape: Tape, x: int, width: int, size: int, ms: float) -> int:
    """A matrix product that saves its input, and an activation that saves its output."""
    y = tape.apply(
        "linear", [x], size, flops=ms * 40e9, save="i", parameters=[tape.parameter(4 * width * width)]
    )
    return tape.apply("act", [y], size, save="o")


def chain(layers: int = 400, seed: int = 0) -> GraphFile:
    """A deep chain of layers that differ in size and time."""
    rnd = random.Random(seed)
    tape = Tape(f"chain{layers}")
    inputs = x = _inputs(tape, 4 * MB)
    for _ in range(layers):
        x = _layer(tape, x, 256, rnd.choice((2, 4, 8)) * MB, rnd.choice((0.2, 1.0, 3.0)))
    loss(tape, x)
    return tape.train([inputs])


def branches(width: int = 24, depth: int = 4, stages: int = 4) -> GraphFile:
    """Stages of many parallel branches that meet again."""
    tape = Tape(f"branches{width}")
    inputs = x = _inputs(tape, 4 * MB)
    for _ in range(stages):
        ends = []
        for branch in range(width):
            y = x
            for _ in range(depth):
                y = _layer(tape, y, 128, (1 + branch % 3) * MB, 0.3 + 0.1 * (branch % 5))
            ends.append(y)
        x = tape.apply("cat", ends, 4 * MB)
    loss(tape, x)
    return tape.train([inputs])


def experts(layers: int = 8, count: int = 8) -> GraphFile:
    """Transformer layers whose feed-forward part is a routed mixture of experts of uneven load."""
    tape = Tape(f"experts{layers}")
    inputs = x = _inputs(tape, 8 * MB)
    for _ in range(layers):
        y = tape.apply("norm", [x], 8 * MB, save="ix", extra=MB // 64)
        y = _layer(tape, y, 512, 8 * MB, 2.0)
        x = tape.apply("add", [x, y], 8 * MB)
        routed = []
        for expert in range(count):
            part = tape.apply("gather", [x], (1 + expert % 4) * MB // 2, save="")
            routed.append(_layer(tape, part, 512, (1 + expert % 4) * MB, 0.4 * (1 + expert % 4)))
        x = tape.apply("combine", [x, *routed], 8 * MB, save="i")
    loss(tape, x)
    return tape.train([inputs])


def accumulation(rounds: int = 8, layers: int = 20) -> GraphFile:
    """Several micro-batches in one iteration: forward and backward alternate, gradients accumulate."""
    tensors: list[TensorRow] = []
    ops: list[OpRow] = []

    def make(name: str, reads: list[int], size: int, ms: float, phase: str) -> int:
        tensors.append(TensorRow(id=len(tensors), bytes=size, name=name))
        ops.append(
            OpRow(
                name=name,
                ms=ms,
                reads=reads,
                writes=[len(tensors) - 1],
                phase=phase,
                replayable=name != "load",
            )
        )
        return len(tensors) - 1

    totals: list[int] = []
    for _ in range(rounds):
        acts = [make("load", [], 2 * MB, 0.01, "forward")]
        for layer in range(layers):
            acts.append(make("layer", [acts[-1]], (1 + layer % 4) * MB, 0.5 + layer % 3, "forward"))
        grad = make("loss", [acts[-1]], MB, LAUNCH_MS, "backward")
        fresh: list[int] = []
        for layer in range(layers - 1, -1, -1):
            weight = make("layer.weight.grad", [grad, acts[layer]], MB // 2, 0.5 + layer % 3, "backward")
            old = totals[layers - 1 - layer] if totals else None
            fresh.append(weight if old is None else make("add", [old, weight], MB // 2, 0.02, "backward"))
            grad = make(
                "layer.grad", [grad, acts[layer + 1]], (1 + layer % 4) * MB, 0.5 + layer % 3, "backward"
            )
        totals = fresh
    return GraphFile(schema=SCHEMA, name=f"accumulation{rounds}", tensors=tensors, ops=ops, keep=totals)


FAMILIES: dict[str, Callable[[], GraphFile]] = {
    "random60": lambda: random_dag(60, 1),
    "random300": random_dag,
    "random1500": lambda: random_dag(1500, 2),
    "chain30": lambda: chain(30, 1),
    "chain400": chain,
    "branches24": branches,
    "experts8": experts,
    "accumulation8": accumulation,
}
