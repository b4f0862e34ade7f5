"""Recreate: evict until the budget holds.

At an overfull slot, the tensors that are idle there are ranked by relief per recompute time (with noise), a few of the first are tried,
and the cheapest in earnest is kept. With a link, what is dear to recompute may be copied out instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.lives import EMPTY
from memopt.advisors.graphs.runs import Swap
from memopt.advisors.graphs.search.moves import Moves

TRIES = 3
"""Evictions that are weighed against one another at one slot: each has to be made and undone to know its price."""
FAILURES = 8
"""After so many that relieve nothing the best so far is taken."""
HOPELESS = 24
"""As above, where none has relieved anything yet: before a slot is given up."""
SAMPLE = 64
"""Tensors that are ranked at a slot; of more a sample, so that a move takes as long in a large graph as in a small one."""
REFINED = 16
"""Of those, the first whose price is reckoned with what their inputs would cost."""
BULK = 16
"""Evictions at one slot, from which on they are made in order and not weighed."""
DEAR = 4.0
"""In bulk, a rerun is placed early only where late its inputs would cost so many times as much as itself."""
NEAR = 8
"""Slots on each side of one that nothing relieves, which are short for the same reason."""
AROUND = 40
"""Slots before a read in which the rerun's own inputs have to be held."""
EARLIER = (0, 0, 1, 1, 2, 3)
"""By how many runs a rerun goes before its read: mostly just before, where it holds memory for the shortest time."""


class Recreate(Moves):
    """Evictions where memory is short."""

    noise = 0.5
    breadth = 0.5
    swap_first = 0.0
    tries = TRIES

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
        return self._refine(rank[:REFINED], slot) + rank[REFINED:]

    def _refine(self, rank: list[tuple[float, int, int]], slot: int) -> list[tuple[float, int, int]]:
        """Add the makers of inputs that are away then to the cost; and, at its own cost alone, the rerun right before they go."""
        state = self.state
        refined = []
        for price, tensor, after in rank:
            maker = state.maker[tensor]
            own = state.ms[maker] + 1e-7
            cost, early = self._late_and_early(tensor, slot, after)
            refined.append((price * (own + cost) / own, tensor, after))
            if early < after:
                refined.append((price, tensor, early))
        refined.sort()
        return refined

    def _late_and_early(self, tensor: int, slot: int, after: int) -> tuple[float, int]:
        """Time for the inputs of the tensor's maker that are away at `after`, and the last moment past `slot` when all are there; `after`
        where they are then, or that is before `slot`."""
        state = self.state
        cost, early = 0.0, after
        for source in state.reads[state.maker[tensor]]:
            if not state.alive(source, after):
                cost += state.ms[state.maker[source]]
                early = min(early, state.life_end(source, after))
        return cost, early if early > slot + 1 else after

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

    def press(self, until: float, most_cost: float = math.inf) -> None:
        """Evict wherever memory is short, as far as that goes: a slot that nothing relieves is left as it is. Cannot be undone."""
        hopeless = np.zeros(len(self.state.memory), dtype=np.bool_)
        while now() < until:
            memory = np.where(hopeless, 0, self.state.memory)
            slot = int(memory.argmax())
            if int(memory[slot]) <= self.budget:
                return
            if self._relieve(slot, set(), most_cost):
                if self.crowded():
                    self.state.commit()
                    self.spread_out()
                    hopeless = np.zeros(len(self.state.memory), dtype=np.bool_)
            else:
                hopeless[max(0, slot - NEAR) : slot + NEAR] = True

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
            at = self._evict_before(tensor, slot, after, most_cost)
            gain = before_over - self.overflow() if at else 0
            if gain > 0:
                if self.tries == 1:
                    return True
                value = (state.cost - before_cost + 1e-7) / gain
                if best is None or value < best[0]:
                    best = (value, tensor, at)
                tried += 1
            failed += not at
            state.undo_to(mark)
            if tried >= self.tries or failed >= (FAILURES if tried else HOPELESS):
                break
        if best is None:
            return self._swap_out(slot)
        return self.evict(best[1], best[2], most_cost)

    def _evict_before(self, tensor: int, slot: int, after: int, most_cost: float) -> int:
        """Rerun the tensor's maker just before the read at `after`, or some runs earlier where memory is short there; gives where, or 0."""
        state = self.state
        mark = len(state.journal)
        done = self.evict(tensor, after, most_cost)
        steps = self.random.choice(EARLIER)
        if not steps or (
            done and int(state.memory[max(slot + 1, after - AROUND) : after + 1].max()) <= self.budget
        ):
            return after if done else 0
        state.undo_to(mark)
        at = after
        for _ in range(steps):
            at -= 1
            while at > slot + 1 and state.slot_op[at] == EMPTY:
                at -= 1
        if at > slot + 1 and self.evict(tensor, at, most_cost):
            return at
        state.undo_to(mark)
        return after if done and self.evict(tensor, after, most_cost) else 0

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
            cost, early = self._late_and_early(tensor, slot, uses[index])
            at = early if cost > DEAR * state.ms[state.maker[tensor]] else uses[index]
            if self.evict(tensor, at, most_cost) and int(state.memory[slot]) < before:
                done = True
                if int(state.memory[slot]) <= self.budget:
                    break
            else:
                state.undo_to(mark)
        return done

    def _swap_out(self, slot: int) -> bool:
        """Add the swap that relieves `slot` of a tensor that is dear to recompute, if the lanes have time for one."""
        if not self.lanes:
            return False
        lanes, state = self.lanes, self.state
        before = self.overflow()
        for swap in self.idle_swaps(slot)[:2]:
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
            price = self.price(tensor) * math.exp(self.noise * rnd.gauss(0.0, 1.0))
            last = state.life_end(tensor, slot)
            rank.extend((-price, swap) for swap in self.swaps_between(tensor, last, uses[index])[:1])
        rank.sort()
        return [swap for _, swap in rank]

    def price(self, tensor: int) -> float:
        """Time of its maker per byte: what a swap saves."""
        state = self.state
        maker = state.maker[tensor]
        return (state.ms[maker] if state.replayable[maker] else 1e9) / state.size[tensor]

    def swaps_between(self, tensor: int, last: int, need: int) -> list[Swap]:
        """The swaps of `tensor` for the time between its runs at `last` and `need`: those of them that are first runs can name it."""
        state = self.state
        found: list[Swap] = []
        if state.runs_at[op := state.slot_op[last]][0] == last:
            found.append((tensor, op, True))
        if need == state.end:
            found.append((tensor, self.graph.op_count, False))
        elif state.runs_at[op := state.slot_op[need]][0] == need:
            found.append((tensor, op, False))
        return found
