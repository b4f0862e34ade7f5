"""The planner of last resort: run sequences of little memory, however often ops run again.

Ops are walked in order. What an op reads and is away is made again in one go: the missing ancestors, each once, the input that needs the
most memory first (Sethi and Ullman 1970, on a graph whose shared parts are held until their last read). Where that does not fit,
something else on the device goes, cheapest per byte to make again as things are, and is made again in its turn later. Chains are made
again from their beginning, in quadratic time, trees depth first. Not optimal: neither the order of shared parts nor what goes is searched.
O(runs x what is on the device).
"""

from __future__ import annotations

import math

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.program import last_service
from memopt.advisors.graphs.graph import Graph
from memopt.advisors.graphs.runs import peak_of_runs

MOST_RUNS = 400_000
"""Of ops, over and over: a plan of so many has gone in a circle, and no memory holds more of them."""
TRIED = 12
"""So many of the tensors at hand are looked at closely before one goes."""
CLOSE = 0.01
"""The least peak is looked for until it is known so well."""


def least_memory(graph: Graph, budget_bytes: int, until: float = math.inf) -> list[int]:
    """A run sequence within `budget_bytes`; empty where none was found."""
    return _Walk(graph, budget_bytes, until).runs_of_all()


def lowest_peak(graph: Graph, low_bytes: int, high_bytes: int, until: float = math.inf) -> list[int]:
    """The run sequence of the lowest peak found from `low_bytes` up to less than `high_bytes`; empty where there is none.
    The lowest first, then halving the ratio."""
    best: list[int] = []
    budget_bytes = low_bytes
    while now() < until and low_bytes <= budget_bytes < high_bytes:
        if runs := least_memory(graph, budget_bytes, until):
            best, high_bytes = runs, peak_of_runs(graph, runs)
        else:
            low_bytes = budget_bytes + 1
        if high_bytes <= low_bytes * (1 + CLOSE):
            break
        budget_bytes = max(low_bytes, math.isqrt(low_bytes * high_bytes))
    return best


class _Walk:
    """What is on the device while the ops run in order."""

    def __init__(self, graph: Graph, budget_bytes: int, until: float) -> None:
        self.graph, self.budget, self.until = graph, budget_bytes, until
        self.reads, self.writes = graph.reads, graph.writes
        self.size: list[int] = graph.tensor_bytes.tolist()
        self.ms: list[float] = graph.op_ms.tolist()
        self.workspace: list[int] = graph.op_workspace_bytes.tolist()
        self.maker: list[int] = graph.producer.tolist()
        self.replayable: list[bool] = graph.replayable.tolist()
        self.serves = last_service(graph, graph.op_count)
        self.here: set[int] = set()
        self.used = graph.resident_bytes
        self.runs: list[int] = []
        self.kept = np.flatnonzero(graph.kept & ~graph.resident).tolist()
        self.uses: list[list[int]] = [[] for _ in range(graph.tensor_count)]
        for op, tensors in enumerate(self.reads):
            for tensor in tensors:
                self.uses[tensor].append(op)
        for tensor in self.kept:
            self.uses[tensor].append(graph.op_count)
        self.next_at = [0] * graph.tensor_count

    def runs_of_all(self) -> list[int]:
        """Every op in order, with the reruns before it; empty when something does not fit, or out of time."""
        for op in range(self.graph.op_count + 1):
            if not self._perform(op):
                return []
        return self.runs

    def next_use(self, tensor: int, op: int) -> int:
        """The first op after `op` that reads the tensor for the first time round; far away when none does."""
        uses, at = self.uses[tensor], self.next_at[tensor]
        while at < len(uses) and uses[at] <= op:
            at += 1
        self.next_at[tensor] = at
        return uses[at] if at < len(uses) else 2 * self.graph.op_count

    def _perform(self, op: int) -> bool:
        """Run `op` for the first time; with the number of ops: have at hand what is kept."""
        while True:
            if len(self.runs) > MOST_RUNS or now() > self.until:
                return False
            wanted = self.reads[op] if op < self.graph.op_count else tuple(self.kept)
            order = self._order(wanted)
            for hold in (True, False):
                peak, at = self._peak(order, op, hold=hold)
                if peak <= self.budget:
                    break
            if peak <= self.budget:
                self._commit(order, op, hold=hold)
                return True
            if not self._give_way(order, op, wanted, peak, at):
                return False

    def _order(self, wanted: tuple[int, ...]) -> list[int]:
        """The ops that make what is wanted and away, and what they need in turn, each once: the most demanding input first."""
        reads, maker, here = self.reads, self.maker, self.here
        missing: set[int] = set()
        stack = [maker[tensor] for tensor in wanted if tensor not in here]
        while stack:
            op = stack.pop()
            if op not in missing:
                missing.add(op)
                stack.extend(maker[tensor] for tensor in reads[op] if tensor not in here)
        if len(missing) < 2:
            return list(missing)
        need: dict[int, int] = {}
        inputs: dict[int, list[int]] = {}
        for op in sorted(missing):
            need[op], inputs[op] = self._need(reads[op], op, need)
        _, first = self._need(wanted, -1, need)
        order: list[int] = []
        done: set[int] = set()
        work = [(op, 0) for op in reversed(first)]
        while work:
            op, position = work.pop()
            if op in done:
                continue
            before = inputs[op]
            while position < len(before) and before[position] in done:
                position += 1
            if position < len(before):
                work += [(op, position + 1), (before[position], 0)]
            else:
                done.add(op)
                order.append(op)
        return order

    def _need(self, tensors: tuple[int, ...], op: int, need: dict[int, int]) -> tuple[int, list[int]]:
        """Bytes that making the tensors and running `op` on them takes, as if nothing were shared; the makers in the best order."""
        makers = {self.maker[tensor] for tensor in tensors if tensor not in self.here}
        stays = {each: sum(self.size[t] for t in self.writes[each] if t in tensors) for each in makers}
        order = sorted(makers, key=lambda each: (stays[each] - need[each], each))
        most = held = 0
        for each in order:
            most = max(most, held + need[each])
            held += stays[each]
        if op >= 0:
            most = max(most, held + self.workspace[op] + sum(self.size[t] for t in self.writes[op]))
        return most, order

    def _peak(self, order: list[int], op: int, *, hold: bool) -> tuple[int, int]:
        """Most on the device while the ops of `order` and then `op` run, and which of them it is; `hold`: what is read later stays."""
        size, here = self.size, self.here
        left = self._reads_left(order, op)
        held = peak = self.used
        worst = len(order)
        made: set[int] = set()
        for at, each in enumerate((*order, op)):
            if each == self.graph.op_count:
                break
            takes = self.workspace[each] + sum([size[t] for t in self.writes[each]])
            if held + takes > peak:
                peak, worst = held + takes, at
            for tensor in self.writes[each]:
                if (
                    tensor not in here
                    and tensor not in made
                    and (tensor in left or (hold and self._is_read_later(tensor, op)))
                ):
                    made.add(tensor)
                    held += size[tensor]
            for tensor in self.reads[each]:
                left[tensor] -= 1
                if not left[tensor] and tensor in made and not (hold and self._is_read_later(tensor, op)):
                    made.discard(tensor)
                    held -= size[tensor]
        return peak, worst

    def _is_read_later(self, tensor: int, op: int) -> bool:
        return self.next_use(tensor, op) <= self.graph.op_count

    def _reads_left(self, order: list[int], op: int) -> dict[int, int]:
        """How often each tensor is read in a go."""
        left: dict[int, int] = {}
        for each in order:
            for tensor in self.reads[each]:
                left[tensor] = left.get(tensor, 0) + 1
        for tensor in self.reads[op] if op < self.graph.op_count else self.kept:
            left[tensor] = left.get(tensor, 0) + 1
        return left

    def _give_way(self, order: list[int], op: int, wanted: tuple[int, ...], peak: int, at: int) -> bool:
        """Let go of something, so that less is needed at the op at `at` of the go; False where nothing helps."""
        named = self._reads_left(order, op)
        idle = [t for t in self.here if t not in named and self._may_go(t, op)]
        if idle:
            self._drop_idle(idle, op, peak - self.budget)
            return True
        needed = {*self.reads[order[at]]} if at < len(order) else set(wanted)
        able = [t for t in named if t in self.here and t not in needed and self._may_go(t, op)]
        able.sort(key=lambda t: -self.size[t])
        best: tuple[int, int] | None = None
        for tensor in able[:TRIED]:
            self._drop(tensor)
            lower, _ = self._peak(self._order(wanted), op, hold=False)
            self.here.add(tensor)
            self.used += self.size[tensor]
            if lower < peak and (best is None or lower < best[0]):
                best = lower, tensor
        if best is None:
            return False
        self._drop(best[1])
        return True

    def _drop_idle(self, idle: list[int], op: int, over: int) -> None:
        """Let go of `over` bytes of what the go does not touch: by what making it again takes as things are, of the likeliest few."""
        ranked = sorted(idle, key=lambda t: (*self._rank(t, op, over), t))
        while over > 0 and ranked:
            best = min(ranked[:TRIED], key=lambda t: (*self._true_rank(t, op, over), t))
            ranked.remove(best)
            self._drop(best)
            over -= self.size[best]

    def _true_rank(self, tensor: int, op: int, over: int) -> tuple[float, float]:
        """Of what can be made again at all: time for its missing ancestors, per byte that it frees."""
        if not self._is_read_later(tensor, op):
            return -1.0, -self.size[tensor]
        self.here.discard(tensor)
        order = self._order((tensor,))
        need = self._peak_of(order)
        self.here.add(tensor)
        price = sum(self.ms[each] for each in order) / min(self.size[tensor], over)
        return float(need > self.budget - self.graph.resident_bytes), price

    def _peak_of(self, order: list[int]) -> int:
        """Most that a go itself holds at once."""
        left: dict[int, int] = {}
        for each in order:
            for tensor in self.reads[each]:
                left[tensor] = left.get(tensor, 0) + 1
        held = peak = 0
        for each in order:
            takes = self.workspace[each] + sum([self.size[t] for t in self.writes[each]])
            peak = max(peak, held + takes)
            held += sum([self.size[t] for t in self.writes[each] if t in left])
            for tensor in self.reads[each]:
                left[tensor] -= 1
                if not left[tensor] and tensor not in self.here:
                    held -= self.size[tensor]
        return peak

    def _may_go(self, tensor: int, op: int) -> bool:
        """Whether it has a size and can be made again, or serves nothing any more."""
        maker = self.maker[tensor]
        return self.size[tensor] > 0 and (self.replayable[maker] or self.serves[maker] < op)

    def _rank(self, tensor: int, op: int, over: int) -> tuple[float, float]:
        maker = self.maker[tensor]
        if not self._is_read_later(tensor, op):
            return -1.0, -self.size[tensor]
        cost = self.ms[maker] + sum(
            self.ms[self.maker[source]] for source in self.reads[maker] if source not in self.here
        )
        return cost / min(self.size[tensor], over), 0.0

    def _drop(self, tensor: int) -> None:
        self.here.discard(tensor)
        self.used -= self.size[tensor]

    def _commit(self, order: list[int], op: int, *, hold: bool) -> None:
        """Run them; keep what is read later, of what was made on the way only with `hold`."""
        made: set[int] = set()
        for each in order:
            self.runs.append(each)
            made.update(self.writes[each])
        wanted = set(self.kept)
        if op < self.graph.op_count:
            self.runs.append(op)
            wanted = {*self.reads[op], *self.writes[op]}
        for tensor in (made if hold else made & wanted) | (wanted - self.here):
            if tensor not in self.here:
                self.here.add(tensor)
                self.used += self.size[tensor]
        for tensor in [*self.here] if op % 16 == 0 else [*made, *wanted]:
            if (
                tensor in self.here
                and self.serves[self.maker[tensor]] <= op
                and not self._is_read_later(tensor, op)
            ):
                self._drop(tensor)
