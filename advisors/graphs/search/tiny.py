"""Graphs of a handful of ops: the optimum, by the shortest path through all that can be on the device.

A state is the next op and the tensors on the device. An op that runs costs nothing the first time and its milliseconds again; letting go is
free. Dijkstra's algorithm gives the cheapest schedule under a budget; with the larger of two peaks in the place of their
sum it gives the least peak of any. Copies to the host are not among the moves. At most `MOST_STATES` states.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from memopt.advisors.graphs.graph import Graph

MOST_OPS = 10
"""Orders of so many ops can be told apart one by one."""
MOST_TENSORS = 14
"""A state is a set of them: 2^14 are quickly gone through."""
MOST_STATES = 60_000
"""Bounds the time; what has more is left to the search."""

State = tuple[int, int]
"""The next op, and a bit for each tensor on the device."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The cheapest run sequence, or that of the lowest peak; empty where none fits."""

    runs: list[int]


def optimum(graph: Graph, budget_bytes: int | None) -> Optimum | None:
    """The cheapest runs within `budget_bytes`, or, without one, those of the lowest peak. None where the graph is not tiny."""
    if graph.op_count > MOST_OPS or int((~graph.resident).sum()) > MOST_TENSORS:
        return None
    return _Paths(graph, budget_bytes).shortest()


class _Paths:
    """The states and the moves between them."""

    def __init__(self, graph: Graph, budget_bytes: int | None) -> None:
        self.graph, self.budget = graph, budget_bytes
        self.bit = {tensor: 1 << i for i, tensor in enumerate(np.flatnonzero(~graph.resident).tolist())}
        self.size = {bit: int(graph.tensor_bytes[tensor]) for tensor, bit in self.bit.items()}
        self.reads = [self._mask(tensors) for tensors in graph.reads]
        self.writes = [self._mask(tensors) for tensors in graph.writes]
        self.takes = [
            int(graph.op_workspace_bytes[op]) + self._bytes(self.writes[op]) for op in range(graph.op_count)
        ]
        self.kept = self._mask(np.flatnonzero(graph.kept & ~graph.resident).tolist())
        again = 0
        for op in np.flatnonzero(graph.replayable).tolist():
            again |= self.reads[op]
        self.useful = [again | self.kept] * (graph.op_count + 1)
        for op in range(graph.op_count):
            for earlier in range(op + 1):
                self.useful[earlier] |= self.reads[op]

    def _mask(self, tensors: tuple[int, ...] | list[int]) -> int:
        return sum(self.bit[tensor] for tensor in tensors)

    def _bytes(self, mask: int) -> int:
        return sum(size for bit, size in self.size.items() if mask & bit)

    def shortest(self) -> Optimum | None:
        """The path of least cost from nothing to all that is kept."""
        start: State = (0, 0)
        best: dict[State, float] = {start: 0.0}
        came: dict[State, tuple[State, int]] = {}
        queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
        done: set[State] = set()
        held: dict[int, int] = {}
        while queue:
            cost, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if len(done) > MOST_STATES:
                return None
            following, mask = state
            if following == self.graph.op_count and mask & self.kept == self.kept:
                return Optimum(self._runs(came, state))
            if mask not in held:
                held[mask] = self.graph.resident_bytes + self._bytes(mask)
            for op, price, reached in self._moves(following, mask, held[mask]):
                dearer = max(cost, price) if self.budget is None else cost + price
                if dearer < best.get(reached, float("inf")):
                    best[reached], came[reached] = dearer, (state, op)
                    heapq.heappush(queue, (dearer, -reached[0], reached))
        return Optimum([])

    def _moves(self, following: int, mask: int, held: int) -> list[tuple[int, float, State]]:
        """What can be done: (op, or -1 for letting a tensor go; its price; the state after it)."""
        graph, budget = self.graph, self.budget
        found: list[tuple[int, float, State]] = []
        for op in range(min(following + 1, graph.op_count)):
            first = op == following
            if self.reads[op] & ~mask or not (first or graph.replayable[op]):
                continue
            if not first and not self.writes[op] & ~mask:
                continue
            most = held + self.takes[op]
            if budget is not None and most > budget:
                continue
            price = float(most) if budget is None else 0.0 if first else float(graph.op_ms[op])
            stage = following + first
            found.append((op, price, (stage, (mask | self.writes[op]) & self.useful[stage])))
        rest = mask
        while rest:
            bit = rest & -rest
            rest ^= bit
            found.append((-1, 0.0, (following, mask ^ bit)))
        return found

    def _runs(self, came: dict[State, tuple[State, int]], state: State) -> list[int]:
        runs = []
        while state in came:
            state, op = came[state]
            if op >= 0:
                runs.append(op)
        return runs[::-1]
