"""Segments of the forward pass: which tensors are kept at its cuts, and the runs that make the rest again on demand.

The "forward pass" is what precedes the unplanned peak, since a plain graph need not name phases. The graph is no chain, so a cut keeps every
tensor that the rest of the forward pass still reads there. A recomputed tensor stays until its last use. O(edges) per run sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memopt.advisors.graphs.graph import Graph, IntColumn
from memopt.advisors.graphs.runs import plain_memory

FINEST = 0.5
"""The finest segments have this many times the square root of the ops, on the average, or a hundredth of all bytes if that is less."""

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Of the droppable tensors, for a first plan."""


class Forward:
    """The ops up to the unplanned peak, the tensors that are idle across it, and how wide each cut would be."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.turn = turn = int(np.argmax(plain_memory(graph)[:-1])) if graph.op_count else 0
        count = graph.tensor_count
        self.last_before = graph.producer.copy()
        self.first_after: IntColumn = np.full(count, -1, dtype=np.int64)
        self.last_after: IntColumn = np.full(count, -1, dtype=np.int64)
        for op, tensors in enumerate(graph.reads):
            for tensor in tensors:
                if op <= turn:
                    self.last_before[tensor] = op
                else:
                    self.last_after[tensor] = op
                    if self.first_after[tensor] < 0:
                        self.first_after[tensor] = op
        kept = graph.kept & ~graph.resident
        self.last_after[kept] = graph.op_count
        self.first_after[kept & (self.first_after < 0)] = graph.op_count
        maker = np.maximum(graph.producer, 0)
        self.saved = (graph.producer >= 0) & (graph.producer <= turn) & (self.first_after > turn)
        self.droppable = self.saved & graph.replayable[maker] & (graph.tensor_bytes > 0)
        self.width = self._widths()

    def _widths(self) -> IntColumn:
        """Bytes that the forward pass still reads after each op."""
        change = np.zeros(self.turn + 3, dtype=np.int64)
        for tensor in np.flatnonzero(
            (self.graph.producer >= 0) & (self.graph.producer <= self.turn)
        ).tolist():
            start, end = int(self.graph.producer[tensor]), int(self.last_before[tensor])
            if end > start:
                change[start] += self.graph.tensor_bytes[tensor]
                change[end] -= self.graph.tensor_bytes[tensor]
        return np.cumsum(change)[: self.turn + 1]

    def crossing(self, cuts: Iterable[int]) -> set[int]:
        """Tensors that some cut (after that op) keeps."""
        found: set[int] = set()
        producer, last = self.graph.producer, self.last_before
        for cut in cuts:
            found.update(np.flatnonzero((producer >= 0) & (producer <= cut) & (last > cut)).tolist())
        return found

    def dropped_bytes(self, keep: set[int]) -> int:
        """Bytes of what `runs_keeping` drops."""
        gone = [tensor for tensor in np.flatnonzero(self.droppable).tolist() if tensor not in keep]
        return int(self.graph.tensor_bytes[gone].sum())

    def narrow(self, op: int, reach: int) -> int:
        """The narrowest cut near `op`."""
        low, high = max(0, op - reach), min(self.turn, op + reach)
        return low + int(np.argmin(self.width[low : high + 1]))


def runs_keeping(forward: Forward, keep: set[int]) -> list[int]:
    """The run sequence that drops every droppable tensor outside `keep` after the forward pass and recomputes on demand."""
    graph = forward.graph
    reads, writes = graph.reads, graph.writes
    maker: list[int] = graph.producer.tolist()
    replayable: list[bool] = graph.replayable.tolist()
    last_after: list[int] = forward.last_after.tolist()
    last_before: list[int] = forward.last_before.tolist()
    turn = forward.turn
    here = [False] * graph.tensor_count
    runs: list[int] = []
    for op in range(graph.op_count + 1):
        wanted = (
            reads[op] if op < graph.op_count else tuple(np.flatnonzero(graph.kept & ~graph.resident).tolist())
        )
        if op > turn:
            runs.extend(missing(graph, wanted, here, maker))
        for tensor in wanted:
            here[tensor] = True
        if op == graph.op_count:
            break
        runs.append(op)
        for tensor in writes[op]:
            here[tensor] = True
        if op == turn:
            droppable = forward.droppable
            for tensor in range(graph.tensor_count):
                gone = last_after[tensor] < 0 and last_before[tensor] <= op
                if here[tensor] and (gone or (droppable[tensor] and tensor not in keep)):
                    here[tensor] = not replayable[maker[tensor]]
        elif op > turn:
            for tensor in reads[op]:
                if last_after[tensor] <= op and replayable[maker[tensor]]:
                    here[tensor] = False
    return runs


def missing(graph: Graph, wanted: tuple[int, ...], here: list[bool], maker: list[int]) -> list[int]:
    """Ops to run again, in order, so that all of `wanted` is here; marks what they make."""
    needed: set[int] = set()
    pending = [tensor for tensor in wanted if not here[tensor]]
    while pending:
        op = maker[pending.pop()]
        if op in needed:
            continue
        needed.add(op)
        pending.extend(
            tensor for tensor in graph.reads[op] if not here[tensor] and maker[tensor] not in needed
        )
    order = sorted(needed)
    for op in order:
        for tensor in graph.writes[op]:
            here[tensor] = True
    return order


def sqrt_cuts(forward: Forward) -> list[set[int]]:
    """One plan: a cut after every sqrt(n)-th op of the forward pass."""
    step = max(1, round((forward.turn + 1) ** 0.5))
    return [forward.crossing(forward.narrow(op, step // 3) for op in range(step - 1, forward.turn, step))]


def greedy_cuts(forward: Forward, sweep: int = 24) -> list[set[int]]:
    """Plans for a sweep of the bytes between cuts."""
    size = forward.graph.tensor_bytes
    made = np.zeros(forward.turn + 1, dtype=np.int64)
    for tensor in np.flatnonzero(forward.droppable).tolist():
        made[forward.graph.producer[tensor]] += size[tensor]
    total = int(made.sum())
    if not total:
        return []
    plans: list[set[int]] = []
    finest = min(0.01, FINEST / (forward.turn + 1) ** 0.5)
    for share in np.geomspace(finest, 1.0, sweep):
        limit, filled = share * total, 0
        cuts: list[int] = []
        for op in range(forward.turn):
            filled += int(made[op])
            if filled >= limit:
                cuts.append(forward.narrow(op, max(2, forward.turn // 60)))
                filled = 0
        plans.append(forward.crossing(cuts))
    return plans


def checkpoints(forward: Forward) -> set[int]:
    """Saved tensors of convolutions; of the dearest quarter of the ops where there are none."""
    graph = forward.graph
    saved = forward.droppable.nonzero()[0].tolist()
    found = {tensor for tensor in saved if "conv" in graph.op_names[int(graph.producer[tensor])].lower()}
    if not found:
        dearest = sorted(saved, key=lambda tensor: -float(graph.op_ms[graph.producer[tensor]]))
        found = set(dearest[: len(dearest) // 4])
    return found


def cheapest_dropped(forward: Forward) -> list[set[int]]:
    """What is kept when a share of the tensors that can be made again is dropped, those with the least recompute time per byte."""
    graph = forward.graph
    found = np.flatnonzero(forward.droppable)
    price = graph.op_ms[graph.producer[found]] / graph.tensor_bytes[found]
    ranked: list[int] = found[np.argsort(price, kind="stable")].tolist()
    return [set(range(graph.tensor_count)).difference(ranked[: int(share * len(ranked))]) for share in SHARES]
