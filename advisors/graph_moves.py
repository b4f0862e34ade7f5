"""The moves of the graph search: evict (by a rerun or by a copy), recreate (evict until it fits), drop what is not needed.

State and deltas are exact (`graph_state`), so a move costs tens of microseconds however long the graph is.
Recreate: at an overfull slot, pick among the tensors that are idle there by relief per recompute time (with noise),
and rerun its maker before the next read; each missing input is either kept longer, if that fits, or rerun too. A later rerun
that the new copy makes needless goes at once.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from memopt.advisors.graph import Graph, IntColumn
from memopt.advisors.graph_lanes import Lanes, Swap
from memopt.advisors.graph_state import EMPTY, RunState

TRIES = 3
FAILURES = 8
SAMPLE = 64
REFINED = 16
BULK = 16
NEGLIGIBLE = 0.002
"""Tensors that together are less than this share of the peak are never worth a move."""


class Moves:
    """A working state under a budget, and what can be done to it."""

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
        self.room = 3 if graph.op_count <= 20_000 else 2
        self.full = False
        self.wide = max(1, graph.op_count // 5000)
        self.deadline = math.inf
        self.load(runs)
        self.large = self._large()
        may_go = replays & graph.replayable[graph.producer[self.large]]
        self.movable = self.large[may_go]

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
            if position < len(slots):
                self.drop_if_fits(op, slots[position])
        return True

    def candidates(self, slot: int, slack: float = math.inf) -> list[tuple[float, int, int]]:
        """(time per relieved byte, tensor, slot of next use) of idle tensors on the device across `slot`, cheapest first."""
        state = self.state
        over = max(1, int(state.memory[slot]) - self.budget)
        movable = self.movable
        found = movable[(state.first_slot[movable] < slot) & (state.last_slot[movable] > slot)].tolist()
        if len(found) > SAMPLE * self.wide:
            found = self.random.sample(found, SAMPLE * self.wide)
        covered = np.cumsum(state.memory > self.budget)
        breadth, noise = self.breadth, self.noise
        factors: list[float] = np.exp(self.normal.standard_normal(len(found)) * noise).tolist()
        rank: list[tuple[float, int, int]] = []
        for tensor, factor in zip(found, factors, strict=True):
            uses = state.uses[tensor]
            index = bisect_left(uses, slot)
            if index == len(uses):
                continue
            after = uses[index]
            maker = state.maker[tensor]
            slots = state.runs_at[maker]
            position = bisect_left(slots, slot)
            if after == slot or (position < len(slots) and slots[position] <= after):
                continue
            cost = state.ms[maker]
            if cost > slack and slots[-1] <= after:
                continue
            start = slots[position - 1]
            last = uses[index - 1] if index and uses[index - 1] > start else start
            relief = min(state.size[tensor], over)
            if breadth:
                relief *= max(int(covered[after - 1] - covered[last]), 1) ** breadth
            rank.append((factor * (cost + 1e-7) / relief, tensor, after))
        rank.sort()
        return self._refine(rank[:REFINED]) + rank[REFINED:]

    def _refine(self, rank: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
        """Add the makers of inputs that are away then to the cost."""
        state = self.state
        refined = []
        for price, tensor, after in rank:
            maker = state.maker[tensor]
            own = cost = state.ms[maker] + 1e-7
            for source in state.reads[maker]:
                if not state.alive(source, after):
                    cost += state.ms[state.maker[source]]
            refined.append((price * cost / own, tensor, after))
        refined.sort()
        return refined

    noise = 0.5
    breadth = 0.5

    def recreate(self, most_cost: float, banned: set[int]) -> bool:
        """Evict until the budget holds; False when stuck or dearer than `most_cost`."""
        state = self.state
        memory = state.memory
        for _ in range(400):
            slot = int(memory.argmax())
            if int(memory[slot]) <= self.budget:
                return True
            if state.cost > most_cost:
                return False
            if not self._relieve(slot, banned, most_cost):
                return False
        return False

    def repair(self, until: float) -> None:
        """Evict, whatever it costs, until the budget holds or nothing more can go."""
        while self.overflow() and time.monotonic() < until:
            if not self._relieve(int(self.state.memory.argmax()), set(), math.inf):
                return

    def _relieve(self, slot: int, banned: set[int], most_cost: float) -> bool:
        state = self.state
        if self.lanes and self.random.random() < self.swap_first and self._swap_out(slot):
            return True
        ranked = [item for item in self.candidates(slot, most_cost - state.cost) if item[1] not in banned]
        if self._relieve_in_bulk(slot, ranked, most_cost):
            return True
        mark = len(state.journal)
        before_over = self.overflow()
        before_cost = state.cost
        best: tuple[float, int, int] | None = None
        tried = failed = 0
        for _, tensor, after in ranked:
            if self.evict(tensor, after, most_cost):
                gain = before_over - self.overflow()
                if gain > 0:
                    value = (state.cost - before_cost + 1e-7) / gain
                    if best is None or value < best[0]:
                        best = (value, tensor, after)
                    tried += 1
            else:
                failed += 1
            state.undo_to(mark)
            if tried >= TRIES or (tried and failed >= FAILURES):
                break
        if best is None:
            return self._swap_out(slot)
        return self.evict(best[1], best[2], most_cost)

    def _relieve_in_bulk(self, slot: int, ranked: list[tuple[float, int, int]], most_cost: float) -> bool:
        """Where many evictions are needed at one slot, take them in order without weighing each against others."""
        state = self.state
        over = int(state.memory[slot]) - self.budget
        bulk = BULK * self.wide
        if len(ranked) < bulk or sum(state.size[tensor] for _, tensor, _ in ranked[:bulk]) > over:
            return False
        done = False
        for _, tensor, _ in ranked[:bulk]:
            uses = state.uses[tensor]
            index = bisect_left(uses, slot)
            if index == len(uses) or uses[index] == slot or not state.alive(tensor, slot):
                continue
            mark, before = len(state.journal), int(state.memory[slot])
            if self.evict(tensor, uses[index], most_cost) and int(state.memory[slot]) < before:
                done = True
                if int(state.memory[slot]) <= self.budget:
                    break
            else:
                state.undo_to(mark)
        return done

    swap_first = 0.0

    def _swap_out(self, slot: int) -> bool:
        """Add the swap that relieves `slot` of a tensor that is dear to recompute, if the lanes have time for one."""
        if not self.lanes:
            return False
        lanes, state = self.lanes, self.state
        before = self.overflow()
        for swap in self.idle_swaps(slot)[:4]:
            if swap in lanes.swaps:
                continue
            lanes.swaps.add(swap)
            lanes.retime(state)
            if self.overflow() < before:
                return True
            lanes.swaps.discard(swap)
        lanes.retime(state)
        return False

    def idle_swaps(self, slot: int) -> list[Swap]:
        """Swaps of tensors that are idle at `slot`, dearest to recompute first (with noise)."""
        state, rnd = self.state, self.random
        large = self.large
        found = large[(state.first_slot[large] < slot) & (state.last_slot[large] > slot)].tolist()
        rank: list[tuple[float, Swap]] = []
        for tensor in rnd.sample(found, min(len(found), SAMPLE)):
            uses = state.uses[tensor]
            index = bisect_left(uses, slot)
            if index == len(uses) or uses[index] == slot or not state.alive(tensor, slot):
                continue
            need = uses[index]
            reader = state.slot_op[need] if need < state.end else self.graph.op_count
            if need < state.end and state.runs_at[reader][0] != need:
                continue
            maker = state.maker[tensor]
            price = (state.ms[maker] if state.replayable[maker] else 1e9) / state.size[tensor]
            rank.append((-price * math.exp(self.noise * rnd.gauss(0.0, 1.0)), (tensor, reader)))
        rank.sort()
        return [swap for _, swap in rank]

    def polish(self, reruns: list[tuple[int, int]]) -> None:
        """Try to drop each of these reruns, dearest first."""
        state = self.state
        for count, (op, slot) in enumerate(sorted(reruns, key=lambda item: -state.ms[item[0]])):
            if count % 64 == 63 and time.monotonic() > self.deadline:
                return
            if state.slot_op[slot] == op and state.runs_at[op][0] != slot:
                self.drop_if_fits(op, slot)
