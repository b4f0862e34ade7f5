"""Large-neighbourhood search over run sequences: ruin (take reruns away) and recreate (`moves`), anytime.

Moves that raise the cost are accepted as in simulated annealing; which ruin to try next is learnt from what each gained per second.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.executors.swap_executor import idle_trips
from memopt.advisors.graphs.lives import ADDED
from memopt.advisors.graphs.runs import Swap, memory_of_runs
from memopt.advisors.graphs.search.recreate import Recreate
from memopt.advisors.graphs.search.ruin_choice import Arms


class Search(Recreate):
    """Improves the best plan known, and makes a plan that breaks the budget keep it."""

    iterations = 0

    def greedy(self, noise: float, breadth: float, until: float, swap_first: float = 0.0) -> None:
        """Load the plain sequence, evict until the budget holds, drop what turned out needless; mend it when it does not hold then."""
        self.noise, self.breadth, self.swap_first = noise, breadth, swap_first
        self.load(list(range(self.graph.op_count)))
        self.press(until)
        self.polish_all()
        self.mend(until)

    def lend(self, share: float, noise: float, until: float) -> None:
        """Load the plain sequence with swaps that fill `share` of the out lane up to the peak, dearest to recompute first; then evict."""
        assert self.lanes
        graph, out_ms, rnd = self.graph, self.lanes.out_ms, self.random
        runs = list(range(graph.op_count))
        turn = int(memory_of_runs(graph, runs)[:-1].argmax())
        left_ms = share * float(graph.op_ms[:turn].sum())
        rank: list[tuple[float, Swap]] = []
        for trip in idle_trips(graph, runs, int(graph.tensor_bytes[self.large].min(initial=1))):
            if trip.leave < turn < trip.need:
                price = self.price(trip.tensor) * math.exp(noise * rnd.gauss(0.0, 1.0))
                rank.append((-price, (trip.tensor, trip.leave, True)))
        swaps: list[Swap] = []
        for _, swap in sorted(rank):
            if out_ms[swap[0]] <= left_ms:
                left_ms -= out_ms[swap[0]]
                swaps.append(swap)
        self.noise, self.breadth, self.swap_first = noise, 0.5, 0.0
        self.load(runs, swaps)
        self.press(until)
        self.polish_all()

    def polish_all(self) -> None:
        """Drop whatever can go."""
        self.polish(self.reruns())
        if self.lanes:
            self.lanes.retime(self.state)
        self.state.commit()
        self.keep_if_best()

    def mend(self, until: float) -> None:
        """Take reruns away around a slot where memory is short and evict anew, as long as that does not make it shorter; until nothing is."""
        rnd = self.random
        over = self.overflow()
        while over and now() < until:
            before = self.state.runs(), set(self.lanes.swaps) if self.lanes else set()
            self.noise, self.breadth = rnd.choice((0.05, 0.2, 0.4, 0.8)), rnd.choice((0.0, 0.5, 1.0))
            short = np.flatnonzero(self.state.memory > self.budget)
            reruns = self.reruns()
            at = bisect_left(reruns, int(short[rnd.randrange(len(short))]), key=_slot)
            count = rnd.choice((1, 2, 4, 8, 20))
            near = reruns[max(0, at - 2 * count) : at + 2 * count]
            self.remove(rnd.sample(near, min(count, len(near))))
            self.press(until)
            self.polish(self.reruns())
            if self.lanes:
                self.lanes.retime(self.state)
            after = self.overflow()
            if after <= over:
                over = after
            else:
                self.load(*before)
        self.polish_all()

    def run(self, until: float, enough: float = 0.0, heat: float = 0.004) -> None:
        """Improve the loaded state until the clock reaches `until` or the cost `enough`."""
        self.polish_all()
        begin = now()
        current = self.state.cost
        reruns = self.reruns()
        arms = Arms(self.random)
        while (moment := now()) < until and reruns and self.best_cost > enough + 1e-9:
            self.iterations += 1
            state = self.state
            state.commit()
            warmth = heat * current * (1.0 - (moment - begin) / (until - begin)) ** 2
            allowed = current - warmth * math.log(self.random.random() + 1e-12)
            arm = arms.pick()
            copies = self.copies()
            done = self._attempt(reruns, arm, allowed)
            gain = 0.0
            if done and state.cost <= allowed:
                gain = max(0.0, current - state.cost)
                current = state.cost
                if current < self.best_cost - 1e-9:
                    self.keep_if_best()
                reruns = self.reruns()
            else:
                self.undo_all(*copies)
            arms.learn(arm, gain, now() - moment)
            if self.crowded():
                self.spread_out()
                reruns = self.reruns()

    def _attempt(self, reruns: list[tuple[int, int]], arm: tuple[str, int], allowed: float) -> bool:
        """Ruin, recreate, polish; whether the budget holds."""
        state, rnd = self.state, self.random
        self.noise, self.breadth = rnd.choice((0.05, 0.2, 0.4, 0.8)), rnd.choice((0.0, 0.5, 1.0))
        self.tries = rnd.choice((1, 1, 1, 3))
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
            if index < len(uses) and state.size[tensor]:
                found.extend(self.swaps_between(tensor, state.life_end(tensor, slot), uses[index])[:1])
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
            if now() > until:
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
        rnd = self.random
        count = min(count, len(reruns))
        start = rnd.randrange(len(reruns))
        if where == "block":
            chosen = reruns[max(0, start - count // 2) :][:count]
        elif where == "near":
            near = reruns[max(0, start - 2 * count) :][: 4 * count]
            chosen = rnd.sample(near, min(count, len(near)))
        else:
            chosen = rnd.sample(reruns, count)
        self.remove(chosen)
        return chosen

    def remove(self, reruns: list[tuple[int, int]]) -> None:
        """Take these reruns away, with what served only them."""
        state = self.state
        for op, slot in reruns:
            if state.slot_op[slot] == op:
                state.remove_with_idle(op, slot)


def _slot(item: tuple[int, int]) -> int:
    return item[1]
