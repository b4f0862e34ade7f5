"""Online eviction, replayed offline: the engine under the DTR family, LRU, size, MSPS, Belady and MegEngine's rule.

It walks the ops in order. When an allocation does not fit, the tensor with the smallest score among those on the
device and not in use is dropped; a dropped input is recomputed (recursively, with its own inputs locked) when an op
reads it. A tensor that no op of the iteration will read again is released at once. What differs from the papers:
lifetimes are known beforehand (the trace is complete), so releases need no reference counts.
One run costs O(runs + evictions x tensors on the device), the scan being one NumPy expression.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.graph import FloatColumn, Graph, IntColumn

TINY = 1e-9
Ops = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]
"""What each op reads, what it reads that is always there, and what it writes."""
THRASH = 3.0
"""A rule that reruns for longer than so many iterations is given up."""


class Stuck(Exception):
    """The rule cannot go on under this budget: nothing is left to evict, or it recomputes without end."""

    def __init__(self, op: int, need_bytes: int) -> None:
        super().__init__(f"op {op} needs {need_bytes} bytes")
        self.op = op
        self.need_bytes = need_bytes


class Ledger:
    """What a score reads: which op makes which tensor of which, sizes, costs, and when a tensor was last in use."""

    clock = 0.0
    """In ms."""

    def __init__(self, ops: Ops, maker: list[int], size: list[int], op_cost: list[float]) -> None:
        self.reads, self.resident_reads, self.writes = ops
        self.maker, self.size = maker, size
        self.size_column: FloatColumn = np.array(size, dtype=np.float64)
        self.last_access: FloatColumn = np.zeros(len(size))
        self.may_go = [True] * len(size)
        Ledger.count_time(self, op_cost)

    def count_time(self, op_cost: list[float]) -> None:
        """Take `op_cost`, one number an op, for the ops' times."""
        costs = [op_cost[maker] if maker >= 0 else 0.0 for maker in self.maker]
        self.cost_column: FloatColumn = np.array(costs, dtype=np.float64)


class Score:
    """What a strategy adds to the engine: which tensor to drop first, and what it wants to be told. Subclasses give the formula."""

    def start(self, engine: Ledger) -> None:
        """Called before the first op: keep the engine, whose columns the formulas read."""
        self.engine = engine

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        """Score of each candidate; the smallest is evicted."""
        raise NotImplementedError

    def evicted(self, tensor: int) -> None:
        """`tensor` was dropped although it is needed later, or may be, as a source of a recomputation."""

    def recomputed(self, tensor: int) -> None:
        """`tensor` is on the device again."""

    def staleness(self, candidates: IntColumn) -> FloatColumn:
        """Time since the last access, in ms."""
        found: FloatColumn = self.engine.clock - self.engine.last_access[candidates] + TINY
        return found


class Engine(Ledger):
    """One pass over the graph under one budget with one score."""

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        score: Score,
        *,
        thrash: float = THRASH,
        until: float = float("inf"),
    ) -> None:
        self.until = until
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.score = score
        self.most_rerun_ms = thrash * graph.plain_ms
        self.ms: list[float] = graph.op_ms.tolist()
        ops = graph.reads, graph.resident_reads, graph.writes
        super().__init__(ops, graph.producer.tolist(), graph.tensor_bytes.tolist(), self.ms)
        self.workspace: list[int] = graph.op_workspace_bytes.tolist()
        self.replayable: list[bool] = graph.replayable.tolist()
        count = graph.tensor_count
        self.on_device = [False] * count
        self.locks = [0] * count
        self.evictable = np.zeros(count, dtype=np.bool_)
        self.may_go = [
            maker >= 0 and self.replayable[maker] and size > 0
            for maker, size in zip(self.maker, self.size, strict=True)
        ]
        self.use_ops: list[list[int]] = [[] for _ in range(count)]
        for op, tensors in enumerate(graph.reads):
            for tensor in tensors:
                self.use_ops[tensor].append(op)
        for tensor in np.flatnonzero(graph.kept & ~graph.resident).tolist():
            self.use_ops[tensor].append(graph.op_count)
        self.used = graph.resident_bytes
        self.now = 0
        self.reran_ms = 0.0
        self.runs: list[int] = []

    def count_time(self, op_cost: list[float]) -> None:
        """Take `op_cost`, one number an op, for the ops' times."""
        self.most_rerun_ms *= sum(op_cost) / (self.graph.plain_ms or 1.0)
        self.ms = op_cost
        super().count_time(op_cost)

    def plan(self) -> list[int]:
        """The run sequence; raises `Stuck`."""
        self.score.start(self)
        for op in range(self.graph.op_count):
            self.now = op
            self._perform(op)
        self.now = self.graph.op_count
        kept = np.flatnonzero(self.graph.kept & ~self.graph.resident).tolist()
        for tensor in kept:
            self._lock(tensor)
        for tensor in kept:
            if not self.on_device[tensor]:
                self._perform(self.maker[tensor], again=True)
        return self.runs

    def next_use(self, tensor: int) -> int:
        """The next op, after the current one, that reads the tensor; far away when none does."""
        uses = self.use_ops[tensor]
        index = bisect_right(uses, self.now)
        return uses[index] if index < len(uses) else 2 * self.graph.op_count

    def _perform(self, op: int, *, again: bool = False) -> None:
        """Run `op`, recomputing what it lacks first, with an explicit stack."""
        stack: list[tuple[int, int]] = [(op, 0)]
        reads = self.graph.reads
        for tensor in reads[op]:
            self._lock(tensor)
        while stack:
            current, position = stack.pop()
            inputs = reads[current]
            while position < len(inputs) and self.on_device[inputs[position]]:
                position += 1
            if position < len(inputs):
                source = self.maker[inputs[position]]
                if not self.replayable[source] or len(stack) > self.graph.op_count:
                    raise Stuck(current, self.used)
                stack.append((current, position))
                stack.append((source, 0))
                for tensor in reads[source]:
                    self._lock(tensor)
                continue
            self._run(current, first=not stack and not again)
            for tensor in inputs:
                self._unlock(tensor)

    def _run(self, op: int, *, first: bool) -> None:
        outputs = self.writes[op]
        fresh = [tensor for tensor in outputs if not self.on_device[tensor]]
        need = self.workspace[op] + sum(self.size[tensor] for tensor in outputs)
        if self.used + need > self.budget_bytes:
            self._make_room(op, need)
        self.runs.append(op)
        self.clock += self.ms[op]
        if not first:
            self.reran_ms += self.ms[op]
            if self.reran_ms > self.most_rerun_ms:
                raise Stuck(op, self.used)
        for tensor in self.graph.reads[op]:
            self.last_access[tensor] = self.clock
        for tensor in fresh:
            self.on_device[tensor] = True
            self.used += self.size[tensor]
            self.last_access[tensor] = self.clock
            if not first:
                self.score.recomputed(tensor)
            self._settle(tensor)

    def _make_room(self, op: int, need: int) -> None:
        while self.used + need > self.budget_bytes:
            candidates = np.flatnonzero(self.evictable)
            if not len(candidates) or now() > self.until:
                raise Stuck(op, self.used + need)
            victim = int(candidates[int(np.argmin(self.score(candidates)))])
            self._drop(victim)
            self.score.evicted(victim)

    def _drop(self, tensor: int) -> None:
        self.on_device[tensor] = False
        self.evictable[tensor] = False
        self.used -= self.size[tensor]

    def _lock(self, tensor: int) -> None:
        self.locks[tensor] += 1
        self.evictable[tensor] = False

    def _unlock(self, tensor: int) -> None:
        self.locks[tensor] -= 1
        if not self.locks[tensor] and self.on_device[tensor]:
            self._settle(tensor)

    def _settle(self, tensor: int) -> None:
        """Release a tensor that no op will read again; else let it be evicted, if it may be."""
        if self.locks[tensor]:
            return
        uses = self.use_ops[tensor]
        if not uses or uses[-1] <= self.now:
            self._drop(tensor)
            self.score.evicted(tensor)
        else:
            self.evictable[tensor] = self.may_go[tensor]
