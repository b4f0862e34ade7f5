"""The moves of the graph search on its working state: evict a tensor for a while, drop reruns that are not needed.

State and deltas are exact (`run_state`), so a move costs tens of microseconds however long the graph is.
To evict a tensor is to rerun its maker before the next read; each missing input is either kept longer, if that fits, or rerun too.
A later rerun that the new copy makes needless goes at once.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.graph import Graph, IntColumn
from memopt.advisors.graphs.lives import EMPTY
from memopt.advisors.graphs.runs import Swap
from memopt.advisors.graphs.search.lanes import Lanes
from memopt.advisors.graphs.search.run_state import RunState

CROWD = 1500
"""Runs that were packed together to make room, after which all are laid out afresh."""
NEGLIGIBLE = 0.002
"""Tensors that together are less than this share of the peak are never worth a move."""


class Moves:
    """A working state under a budget, what can be done to it, and the best plan met so far (its `best_over` is 0 when the budget holds)."""

    def __init__(
        self,
        graph: Graph,
        runs: list[int],
        budget_bytes: int,
        *,
        seed: int = 0,
        lanes: Lanes | None = None,
        replays: bool = True,
    ) -> None:
        self.graph = graph
        self.lanes = lanes
        self.budget = budget_bytes
        self.random = random.Random(seed)
        self.normal = np.random.default_rng(seed)
        self.room = 6 if graph.op_count <= 20_000 else 3
        self.full = False
        self.wide = max(1, graph.op_count // 5000)
        self.deadline = math.inf
        self.load(runs)
        self.large = self._large()
        may_go = replays & graph.replayable[graph.producer[self.large]]
        self.movable = self.large[may_go]
        self.best_runs = runs
        self.best_cost = self.state.cost
        self.best_over = self.overflow()
        self.best_swaps: frozenset[Swap] = frozenset()

    def _large(self) -> IntColumn:
        """All tensors that some op makes, but for the smallest, which together are negligible."""
        made = np.flatnonzero((self.graph.producer >= 0) & (self.graph.tensor_bytes > 0))
        sizes = self.graph.tensor_bytes[made]
        order = np.argsort(sizes, kind="stable")
        small = int(np.searchsorted(np.cumsum(sizes[order]), NEGLIGIBLE * float(self.state.memory.max())))
        return np.sort(made[order[small:]])

    def load(self, runs: list[int], swaps: Iterable[Swap] = ()) -> None:
        """Work on `runs` and `swaps` from now on."""
        self.state = RunState(self.graph, runs, room=self.room)
        if self.lanes:
            self.lanes.swaps = set(swaps)
            self.lanes.retime(self.state)

    def overflow(self) -> int:
        """Bytes over the budget, summed over all slots."""
        over = self.state.memory - self.budget
        return int(over[over > 0].sum())

    def load_best(self) -> None:
        """Work on the best plan known."""
        self.load(self.best_runs, self.best_swaps)

    def keep_if_best(self) -> None:
        """Remember the state when it is the best so far."""
        over = self.overflow()
        if (over, self.state.cost) < (self.best_over, self.best_cost - 1e-9):
            self.best_over, self.best_cost = over, self.state.cost
            self.best_runs = self.state.runs()
            self.best_swaps = frozenset(self.lanes.swaps) if self.lanes else frozenset()

    def copies(self) -> tuple[set[Swap], IntColumn]:
        """The swaps and their credit, for `undo_all`."""
        return (set(self.lanes.swaps), self.state.credit.copy()) if self.lanes else (set(), self.state.credit)

    def undo_all(self, swaps: set[Swap], credit: IntColumn) -> None:
        """Back to the state at the last commit, and to the swaps that it had."""
        self.state.undo_to(0)
        if self.lanes:
            self.lanes.swaps = swaps
            self.state.memory += self.state.credit - credit
            self.state.credit = credit

    def crowded(self) -> bool:
        """Whether some place has no empty slot left, or has had to be made room in too often."""
        return self.full or self.state.moved > CROWD

    def spread_out(self) -> None:
        """Lay the runs out afresh where they are crowded; what was done so far cannot be undone then."""
        if self.crowded():
            self.full = False
            self.load(self.state.runs(), self.lanes.swaps if self.lanes else ())

    def reruns(self) -> list[tuple[int, int]]:
        """All reruns of the state, in time."""
        runs_at = self.state.runs_at
        found = [(slot, op) for op, slots in enumerate(runs_at) if len(slots) > 1 for slot in slots[1:]]
        found.sort()
        return [(op, slot) for slot, op in found]

    def drop_if_fits(self, op: int, slot: int) -> bool:
        """Take a rerun away if the budget still holds without it."""
        state = self.state
        mark = len(state.journal)
        low, high = self._reach(op, slot)
        state.remove_with_idle(op, slot)
        if int(state.memory[low:high].max()) <= self.budget:
            return True
        state.undo_to(mark)
        return False

    def _could_go(self, op: int, slot: int) -> bool:
        """Whether what the rerun at `slot` makes may fit if it is kept from before instead: quick, and nearly always right."""
        state = self.state
        size, memory = state.size, state.memory
        low, _ = self._reach(op, slot)
        room = self.budget - sum(size[tensor] for tensor in state.writes[op])
        kept = slot
        freed = 0
        for tensor in state.reads[op]:
            uses = state.uses[tensor]
            index = bisect_left(uses, slot)
            slots = state.runs_at[state.maker[tensor]]
            start = slots[bisect_left(slots, slot) - 1]
            kept = min(kept, max(start, uses[index - 1]) if index else start)
            freed += size[tensor]
        kept = max(kept, low) + 1
        before = int(memory[low + 1 : kept].max(initial=0))
        return before <= room and int(memory[kept:slot].max(initial=0)) <= room + freed

    def _reach(self, op: int, slot: int) -> tuple[int, int]:
        """Slots over which outputs of the rerun at `slot` would have to be kept without it."""
        state = self.state
        slots = state.runs_at[op]
        position = bisect_left(slots, slot)
        start = slots[position - 1]
        low = slot
        for tensor in state.writes[op]:
            uses = state.uses[tensor]
            index = bisect_left(uses, slot)
            last = uses[index - 1] if index and uses[index - 1] > start else start
            low = min(low, last)
        return low, slot + 1

    def evict(self, tensor: int, before: int, most_cost: float) -> bool:
        """Rerun the maker of `tensor` just before the run at `before`, so that it can be absent until then. False: not possible (undo)."""
        state = self.state
        memory = state.memory
        free = before - 1
        heap: list[int] = [-state.maker[tensor]]
        waiting: dict[int, list[tuple[int, int]]] = {state.maker[tensor]: []}
        worst = int(memory[max(0, before - 40) : before + 1].max())
        limit = max(self.budget, worst)
        placed: list[tuple[int, int]] = []
        while heap:
            op = -heapq.heappop(heap)
            full = free < 0 or (state.slot_op[free] != EMPTY and not state.make_empty(free))
            if full or state.cost > most_cost or not state.replayable[op] or state.runs_at[op][0] >= free:
                self.full |= full
                for reads in waiting.values():
                    for used, at in reads:
                        state.add_use(used, at)
                return False
            if state.runs_at[op][-1] > free:
                most_cost += state.ms[op]
            state.add_writes(op, free)
            placed.append((op, free))
            for used, at in waiting.pop(op):
                state.add_use(used, at)
            pending_reads = state.reads[op]
            for source in pending_reads:
                if state.alive(source, free):
                    state.add_use(source, free)
                    continue
                maker = state.maker[source]
                if maker in waiting:
                    waiting[maker].append((source, free))
                    continue
                end = state.life_end(source, free)
                top = int(memory[end + 1 : free + 1].max())
                if top + state.size[source] <= self.budget or not state.replayable[maker]:
                    state.add_use(source, free)
                else:
                    waiting[maker] = [(source, free)]
                    heapq.heappush(heap, -maker)
            free -= 1
        if int(memory[free + 1 : before + 1].max()) > limit:
            return False
        for op, at in placed:
            slots = state.runs_at[op]
            position = bisect_left(slots, at) + 1
            if position < len(slots) and self._could_go(op, slots[position]):
                self.drop_if_fits(op, slots[position])
        return True

    def polish(self, reruns: list[tuple[int, int]]) -> None:
        """Try to drop each of these reruns, dearest first."""
        state = self.state
        for count, (op, slot) in enumerate(sorted(reruns, key=lambda item: -state.ms[item[0]])):
            if count % 64 == 63 and now() > self.deadline:
                return
            if state.slot_op[slot] == op and state.runs_at[op][0] != slot:
                self.drop_if_fits(op, slot)
