"""Eviction scores for `engine`: what each online rule would drop first (smallest score)."""

from __future__ import annotations

import numpy as np

from memopt.advisors.graphs.executors.engine import TINY, Engine, Ledger, Score
from memopt.advisors.graphs.graph import FloatColumn, IntColumn

MOST_BITS = 10_000
"""Of evicted tensors, for whose regions there is memory as bits."""


class Lru(Score):
    """Least recently used first."""

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        return -self.staleness(candidates)


class LargestFirst(Score):
    """Largest first."""

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        return -self.engine.size_column[candidates]


def next_uses(engine: Ledger, candidates: IntColumn) -> FloatColumn:
    """Ops until each is used again."""
    assert isinstance(engine, Engine)
    return np.array([float(engine.next_use(tensor) - engine.now) for tensor in candidates.tolist()])


class Belady(Score):
    """Furthest next use first (known: the trace is complete)."""

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        return -next_uses(self.engine, candidates)


class Local(Score):
    """h_DTR without the neighbourhood: own cost over bytes times staleness."""

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        engine = self.engine
        found: FloatColumn = (engine.cost_column[candidates] + TINY) / (
            engine.size_column[candidates] * self.staleness(candidates)
        )
        return found


class Neighbours(Score):
    """Keeps, for every tensor on the device, the cost of the evicted tensors around it; reckoned anew only where that changed since the
    last time that anything was evicted for room."""

    def start(self, engine: Ledger) -> None:
        """Nothing is evicted yet."""
        super().start(engine)
        self.gone = [False] * len(engine.size)
        self.cost: list[float] = engine.cost_column.tolist()
        self.parents = [engine.reads[maker] if maker >= 0 else () for maker in engine.maker]
        children: list[list[int]] = [[] for _ in engine.size]
        for op, tensors in enumerate(engine.reads):
            for tensor in tensors:
                children[tensor].extend(engine.writes[op])
        self.children = [tuple(found) for found in children]
        self.next_to = [(*above, *below) for above, below in zip(self.parents, self.children, strict=True)]
        self.ways: tuple[list[tuple[int, ...]], ...] = (self.parents, self.children)
        """Where the neighbourhood spreads to."""
        self.changed: set[int] = set()
        """Evicted or recomputed since then."""
        self.around: FloatColumn = np.zeros(len(engine.size))
        self.stale = np.zeros(len(engine.size), dtype=np.bool_)

    def evicted(self, tensor: int) -> None:
        """Everything on the edge of the evicted region that it joins has a new neighbourhood."""
        self.gone[tensor] = True
        self.changed.add(tensor)

    def recomputed(self, tensor: int) -> None:
        """Everything on the edge of the evicted region that it leaves has a new neighbourhood."""
        if self.gone[tensor]:
            self.gone[tensor] = False
            self.changed.add(tensor)

    def neighbourhood(self, candidates: IntColumn) -> FloatColumn:
        """Cost around each candidate."""
        self._mark()
        self.changed.clear()
        stale: list[int] = candidates[self.stale[candidates]].tolist()
        self.steps = 0
        for number, tensor in enumerate(stale):
            if self.steps > len(self.gone):
                self.around[stale[number:]] = self._region_costs(stale[number:])
                break
            self.around[tensor] = self.region_cost(tensor)
        self.stale[stale] = False
        found: FloatColumn = self.around[candidates]
        return found

    def region_cost(self, tensor: int) -> float:
        """Cost of the evicted ancestors and the evicted descendants of one tensor."""
        total = 0.0
        for edges in self.ways:
            seen = {tensor}
            pending = [tensor]
            while pending:
                for other in edges[pending.pop()]:
                    if self.gone[other] and other not in seen:
                        seen.add(other)
                        pending.append(other)
                        total += self.cost[other]
            self.steps += len(seen)
        return total

    def _region_costs(self, tensors: list[int]) -> FloatColumn:
        """What `region_cost` gives for each of these, where the regions are large: each evicted tensor's region is told once, as bits."""
        maker = self.engine.maker
        regions = sorted(
            (tensor for tensor, gone in enumerate(self.gone) if gone), key=lambda each: maker[each]
        )
        if len(regions) > MOST_BITS:
            return np.array([self.region_cost(tensor) for tensor in tensors])
        cost = np.array([self.cost[tensor] for tensor in regions])
        number = {tensor: index for index, tensor in enumerate(regions)}
        total = np.zeros(len(tensors))
        for way, edges in enumerate(self.ways):
            bits: dict[int, int] = {}
            for tensor in reversed(regions) if way else regions:
                bits[tensor] = _union(bits, edges[tensor]) | 1 << number[tensor]
            for index, tensor in enumerate(tensors):
                told = _union(bits, edges[tensor]).to_bytes(len(regions) // 8 + 1, "little")
                there = np.unpackbits(np.frombuffer(told, dtype=np.uint8), bitorder="little")[: len(regions)]
                total[index] += cost[there > 0].sum()
        return total

    def _mark(self) -> None:
        """What is next to a region that has changed, or is in one that has split, is stale."""
        seen = set(self.changed)
        pending = list(seen)
        self.stale[pending] = True
        gone, next_to = self.gone, self.next_to
        edge: list[int] = []
        while pending:
            for other in next_to[pending.pop()]:
                if other in seen:
                    continue
                seen.add(other)
                if gone[other]:
                    pending.append(other)
                else:
                    edge.append(other)
        self.stale[edge] = True


def _union(bits: dict[int, int], tensors: tuple[int, ...]) -> int:
    found = 0
    for tensor in tensors:
        found |= bits.get(tensor, 0)
    return found


class Dtr(Neighbours):
    """h_DTR: (own cost + cost of the evicted neighbourhood) / (bytes x staleness)."""

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        engine = self.engine
        cost = engine.cost_column[candidates] + self.neighbourhood(candidates) + TINY
        found: FloatColumn = cost / (engine.size_column[candidates] * self.staleness(candidates))
        return found


class Msps(Neighbours):
    """Memory saving per second: bytes over the time to bring the tensor back with its evicted ancestors."""

    def start(self, engine: Ledger) -> None:
        """Only what has to be made before is counted."""
        super().start(engine)
        self.ways = (self.parents,)

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        engine = self.engine
        cost = engine.cost_column[candidates] + self.neighbourhood(candidates) + TINY
        found: FloatColumn = cost / engine.size_column[candidates]
        return found


class EqClass(Dtr):
    """h_DTR with evicted tensors merged in union-find classes; a recomputation subtracts its cost, classes never split."""

    def start(self, engine: Ledger) -> None:
        """Every tensor is its own class of cost zero."""
        super().start(engine)
        self.root = list(range(len(engine.size)))
        self.class_cost = [0.0] * len(engine.size)
        self.members: list[list[int]] = [[tensor] for tensor in range(len(engine.size))]

    def find(self, tensor: int) -> int:
        """Representative of the tensor's class."""
        root = self.root
        while root[tensor] != tensor:
            root[tensor] = root[root[tensor]]
            tensor = root[tensor]
        return tensor

    def evicted(self, tensor: int) -> None:
        """Join the classes of the evicted neighbours."""
        if self.gone[tensor]:
            return
        self.gone[tensor] = True
        home = self.find(tensor)
        self.class_cost[home] += self.cost[tensor]
        for other in self.next_to[tensor]:
            if self.gone[other]:
                home = self._join(home, self.find(other))
        self.changed.add(home)

    def recomputed(self, tensor: int) -> None:
        """Take the cost out of the class and give the tensor a class of its own."""
        if not self.gone[tensor]:
            return
        self.gone[tensor] = False
        home = self.find(tensor)
        self.class_cost[home] = max(0.0, self.class_cost[home] - self.cost[tensor])
        self.changed.add(home)
        self.stale[tensor] = True

    def region_cost(self, tensor: int) -> float:
        """Cost of the classes of the evicted neighbours."""
        near = {self.find(other) for other in self.next_to[tensor] if self.gone[other]}
        return sum(self.class_cost[home] for home in near)

    def _join(self, one: int, other: int) -> int:
        if one == other:
            return one
        if len(self.members[one]) < len(self.members[other]):
            one, other = other, one
        self.root[other] = one
        self.class_cost[one] += self.class_cost[other]
        self.members[one].extend(self.members[other])
        self.members[other] = []
        return one

    def _mark(self) -> None:
        """What is next to a class that has changed is stale."""
        for home in {self.find(tensor) for tensor in self.changed}:
            for member in self.members[home]:
                self.stale[list(self.next_to[member])] = True


class MegEngine(EqClass):
    """MegEngine: (neighbour cost + 1e-3) x 1.0001^recomputes / (MiB x (age + 1e-3)), cost and age in bytes touched / 1e8, as it never measures.

    Tensors below 1 MiB stay, or below 1/500 of all bytes where that is less, so that small graphs are planned too. Free neighbours in
    the address space are not modelled: a graph has no addresses.
    """

    def start(self, engine: Ledger) -> None:
        """No tensor was recomputed yet."""
        size = engine.size
        touched = zip(engine.reads, engine.resident_reads, engine.writes, strict=True)
        engine.count_time([sum(size[tensor] for tensor in sum(tensors, ())) / 1e8 for tensors in touched])
        least = min(2**20, sum(size) // 500)
        engine.may_go = [may and size[tensor] >= least for tensor, may in enumerate(engine.may_go)]
        super().start(engine)
        self.times: FloatColumn = np.zeros(len(engine.size))

    def recomputed(self, tensor: int) -> None:
        """Count recomputations, which make a tensor dearer."""
        super().recomputed(tensor)
        self.times[tensor] += 1

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        engine = self.engine
        cost = engine.cost_column[candidates] + self.neighbourhood(candidates) + 1e-3
        cost *= 1.0001 ** self.times[candidates]
        found: FloatColumn = cost / (
            engine.size_column[candidates] / 2**20 * (self.staleness(candidates) + 1e-3)
        )
        return found


class NextUse(Msps):
    """MSPS divided by the distance to the next use: drop what is cheap, large and not wanted for long."""

    def __call__(self, candidates: IntColumn) -> FloatColumn:
        far = next_uses(self.engine, candidates)
        found: FloatColumn = super().__call__(candidates) / np.maximum(far, 1.0)
        return found


SCORES: dict[str, type[Score]] = {
    "dtr": Dtr,
    "dtr-eqclass": EqClass,
    "dtr-local": Local,
    "msps": Msps,
    "lru": Lru,
    "size": LargestFirst,
    "belady": Belady,
    "dtr-megengine": MegEngine,
    "next-use": NextUse,
}
