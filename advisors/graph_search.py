"""Large-neighbourhood search over run sequences: ruin (take reruns away) and recreate (evict until it fits again).

State and deltas are exact (`graph_state`), so a move costs tens of microseconds however long the graph is.
Recreate: at an overfull slot, pick among the tensors that are idle there by relief per recompute time (with noise),
and rerun its maker before the next read; each missing input is either kept longer, if that fits, or rerun too. A later rerun
that the new copy makes needless goes at once. Moves that raise the cost are accepted as in simulated annealing.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from memopt.advisors.graph import Graph
from memopt.advisors.graph_lanes import Lanes, Swap
from memopt.advisors.graph_state import ADDED, EMPTY, RunState

TRIES = 3
FAILURES = 8
SAMPLE = 64
REFINED = 16
BULK = 16


class Search:
    """The best run sequence known, and the search that improves it. `overflow` is 0 when the budget holds."""

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
        ceiling = max(1, int(graph.tensor_bytes.max(initial=1)) // 2000)
        may_go = replays & (graph.producer >= 0) & graph.replayable[np.maximum(graph.producer, 0)]
        self.movable = np.flatnonzero(may_go & (graph.tensor_bytes >= ceiling))
        self.large = np.flatnonzero((graph.producer >= 0) & (graph.tensor_bytes >= ceiling))
        self.load(runs)
        self.best_runs = runs
        self.best_cost = self.state.cost
        self.best_over = self.overflow()
        self.best_swaps: frozenset[Swap] = frozenset()
        self.iterations = 0
        self.deadline = math.inf

    def load(self, runs: list[int], swaps: Iterable[Swap] = ()) -> None:
        """Work on `runs` and `swaps` from now on."""
        self.state = RunState(self.graph, runs, room=self.room)
        if self.lanes:
            self.lanes.swaps = set(swaps)
            self.lanes.retime(self.state)

    def load_best(self) -> None:
        """Work on the best plan known."""
        self.load(self.best_runs, self.best_swaps)

    def overflow(self) -> int:
        """Bytes over the budget, summed over all slots."""
        over = self.state.memory - self.budget
        return int(over[over > 0].sum())

    # --- moves -----------------------------------------------------------------------------------

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

    def greedy(self, noise: float, breadth: float, until: float, swap_first: float = 0.0) -> None:
        """Load the plain sequence, evict until the budget holds, drop what turned out needless."""
        self.noise, self.breadth, self.swap_first = noise, breadth, swap_first
        self.load(list(range(self.graph.op_count)))
        self.repair(until)
        self.polish_all()

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

    # --- the loop --------------------------------------------------------------------------------

    def reruns(self) -> list[tuple[int, int]]:
        """All reruns of the state."""
        state = self.state
        runs_at = state.runs_at
        return [(op, slot) for slot, op in enumerate(state.slot_op) if op != EMPTY and runs_at[op][0] != slot]

    def polish_all(self) -> None:
        """Drop whatever can go."""
        self.polish(self.reruns())
        if self.lanes:
            self.lanes.retime(self.state)
        self.state.commit()
        self.keep_if_best()

    def keep_if_best(self) -> bool:
        """Remember the state when it is the best so far."""
        over = self.overflow()
        if (over, self.state.cost) < (self.best_over, self.best_cost - 1e-9):
            self.best_over, self.best_cost = over, self.state.cost
            self.best_runs = self.state.runs()
            self.best_swaps = frozenset(self.lanes.swaps) if self.lanes else frozenset()
            return True
        return False

    def run(self, until: float, enough: float = 0.0) -> None:
        """Improve the loaded state until `time.monotonic()` reaches `until` or the cost `enough`."""
        self.polish_all()
        begin = time.monotonic()
        current = self.state.cost
        reruns = self.reruns()
        arms = Arms(self.random)
        while (now := time.monotonic()) < until and reruns and self.best_cost > enough + 1e-9:
            self.iterations += 1
            state = self.state
            state.commit()
            heat = self.heat * current * (1.0 - (now - begin) / (until - begin)) ** 2
            allowed = current - heat * math.log(self.random.random() + 1e-12)
            arm = arms.pick()
            swaps = set(self.lanes.swaps) if self.lanes else None
            done = self._attempt(reruns, arm, allowed)
            gain = 0.0
            if done and state.cost <= allowed:
                gain = max(0.0, current - state.cost)
                current = state.cost
                if current < self.best_cost - 1e-9:
                    self.keep_if_best()
                reruns = self.reruns()
            else:
                state.undo_to(0)
                if self.lanes and swaps is not None:
                    self.lanes.swaps = swaps
                    self.lanes.retime(state)
            arms.learn(arm, gain, time.monotonic() - now)
            if self.full:
                self.full = False
                self.load(state.runs(), self.lanes.swaps if self.lanes else ())
                reruns = self.reruns()

    heat = 0.004

    def _attempt(self, reruns: list[tuple[int, int]], arm: tuple[str, int], allowed: float) -> bool:
        """Ruin, recreate, polish; whether the budget holds."""
        state, rnd = self.state, self.random
        self.noise = rnd.choice((0.05, 0.2, 0.4, 0.8))
        self.breadth = rnd.choice((0.0, 0.5, 1.0))
        self.swap_first = rnd.choice((0.0, 0.0, 0.3))
        removed = self.ruin(reruns, *arm)
        banned = {tensor for op, _ in removed if rnd.random() < 0.3 for tensor in state.writes[op]}
        if self.lanes:
            self._change_swaps(removed)
        if not self.recreate(allowed, banned):
            return False
        fresh = [(op, slot) for kind, op, slot in state.journal if kind == ADDED]
        slot = rnd.choice(removed)[1]
        near = reruns[max(0, bisect_left(reruns, slot, key=_slot) - 12) :][:24]
        self.polish(fresh + near)
        return not self.lanes or self._settled(allowed)

    def _settled(self, allowed: float) -> bool:
        """Whether the budget holds, perhaps after a few more evictions, once the copies moved with the runs."""
        assert self.lanes
        for _ in range(3):
            self.lanes.retime(self.state)
            if int(self.state.memory.max()) <= self.budget:
                return True
            if not self.recreate(allowed, set()):
                return False
        return False

    def _change_swaps(self, removed: list[tuple[int, int]]) -> None:
        """Swap out some of what is not recomputed any more, and perhaps leave some others where they are."""
        assert self.lanes
        rnd, swaps = self.random, self.lanes.swaps
        if swaps and rnd.random() < 0.5:
            for swap in rnd.sample(sorted(swaps), min(len(swaps), rnd.choice((1, 1, 2, 4)))):
                swaps.discard(swap)
        for op, slot in removed:
            if rnd.random() < 0.6:
                swaps.update(self.swaps_for(op, slot))
        if rnd.random() < 0.4:
            swaps.update(self.idle_swaps(rnd.choice(removed)[1])[: rnd.choice((1, 2))])
        self.lanes.retime(self.state)

    def swaps_for(self, op: int, slot: int) -> list[Swap]:
        """Swaps that would bring the outputs of `op` back for their first use after `slot`."""
        state = self.state
        found: list[Swap] = []
        for tensor in state.writes[op]:
            uses = state.uses[tensor]
            index = bisect_left(uses, slot)
            if index == len(uses) or not state.size[tensor]:
                continue
            need = uses[index]
            reader = state.slot_op[need] if need < state.end else self.graph.op_count
            if need == state.end or (reader != EMPTY and state.runs_at[reader][0] == need):
                found.append((tensor, reader))
        return found

    def convert(self, until: float) -> None:
        """Replace reruns by swaps, dearest per byte first, wherever both lanes have time and the budget holds."""
        assert self.lanes
        state, lanes = self.state, self.lanes
        value = {
            op: state.ms[op] / max(1, sum(state.size[tensor] for tensor in state.writes[op]))
            for op, _ in self.reruns()
        }
        for op, slot in sorted(self.reruns(), key=lambda item: -value[item[0]]):
            if time.monotonic() > until:
                return
            if state.slot_op[slot] != op:
                continue
            mark, swaps = len(state.journal), set(lanes.swaps)
            fresh = self.swaps_for(op, slot)
            state.remove_with_idle(op, slot)
            lanes.swaps.update(fresh)
            lanes.retime(state)
            if int(state.memory.max()) > self.budget:
                lanes.swaps = swaps
                state.undo_to(mark)
                lanes.retime(state)
        self.polish_all()

    def ruin(self, reruns: list[tuple[int, int]], where: str, count: int) -> list[tuple[int, int]]:
        """Take `count` reruns away: neighbours in time (all or some of them), or any."""
        state, rnd = self.state, self.random
        count = min(count, len(reruns))
        start = rnd.randrange(len(reruns))
        if where == "block":
            chosen = reruns[max(0, start - count // 2) :][:count]
        elif where == "near":
            near = reruns[max(0, start - 2 * count) :][: 4 * count]
            chosen = rnd.sample(near, min(count, len(near)))
        else:
            chosen = rnd.sample(reruns, count)
        for op, slot in chosen:
            if state.slot_op[slot] == op:
                state.remove_with_idle(op, slot)
        return chosen


class Arms:
    """Which ruin to try next: in proportion to what each gained per second so far, with a floor for all."""

    CHOICES = tuple((where, count) for where in ("block", "near", "any") for count in (1, 2, 4, 8, 20, 60))

    def __init__(self, rnd: random.Random) -> None:
        self.random = rnd
        self.gain = dict.fromkeys(self.CHOICES, 1e-9)
        self.seconds = dict.fromkeys(self.CHOICES, 1e-3)

    def pick(self) -> tuple[str, int]:
        """An arm."""
        rates = [self.gain[arm] / self.seconds[arm] for arm in self.CHOICES]
        least = 0.03 * sum(rates) + 1e-12
        return self.random.choices(self.CHOICES, [rate + least for rate in rates])[0]

    def learn(self, arm: tuple[str, int], gain: float, seconds: float) -> None:
        """Older gains count less."""
        self.gain[arm] = 0.98 * self.gain[arm] + gain
        self.seconds[arm] = 0.98 * self.seconds[arm] + seconds


def _slot(item: tuple[int, int]) -> int:
    return item[1]
