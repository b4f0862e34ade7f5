"""Rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, arXiv 1911.13214) on a plain graph: optimal checkpoints on a chain.

Rule: C(s, t, m), the least time for stages s..t of a chain forth and back in m bytes when what enters s is there, is the less of
keeping all that stage s saves, F(s) + C(s+1, t, m - saved(s)), and of keeping only what enters a later stage c,
F(s..c-1) + C(c, t, m - enters(c)) + C(s, c-1, m), over all c: stretches nest. Exact for a chain, for every amount of memory at once in
some hundred slots, as in the paper. O(stages^3 x slots).
What differs: a graph need be no chain. Stages end where the fewest bytes pass, all that passes such a place is its checkpoint, what a
stretch lacks besides is made on demand, and of the optima for all amounts of memory one of the largest that really fit is taken. The
"forward pass" is what precedes the unplanned peak (`segments`). Where wide edges pass every place the plan is poor, or there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.executors.segments import Forward, missing
from memopt.advisors.graphs.graph import FloatColumn, Graph, IntColumn
from memopt.advisors.graphs.problem import Answer, GraphProblem, cheapest_runs
from memopt.advisors.graphs.runs import peak_of_runs

SIZES = ((40, 120), (100, 200))
"""Most stages, and about how many slots."""
AMOUNTS = 40
"""Amounts of memory that are tried."""


def rotor(problem: GraphProblem) -> Answer:
    """Rotor (2019): optimal nested checkpoints by dynamic programming, where the graph is nearly a chain."""
    return cheapest_runs(problem, rotor_plans(problem))


def rotor_plans(problem: GraphProblem) -> Iterator[list[int]]:
    """Optimal run sequences for few stages, then for many: for the least memory, and where that meets the budget for more, until the
    most that does is found."""
    forward = Forward(problem.graph)
    for most_stages, slots in SIZES:
        if now() > problem.until:
            return
        stages = Stages(forward, most_stages, slots)
        if stages.slots:
            yield from _plans(problem, stages)
        if forward.turn < most_stages:
            return


def _plans(problem: GraphProblem, stages: Stages) -> Iterator[list[int]]:
    table = _Table(stages)
    cost = table.cost[0, len(stages.saved) - 1]
    amounts = np.unique(np.linspace(0, stages.slots, AMOUNTS).astype(int))
    amounts = amounts[np.isfinite(cost[amounts])]
    amounts = amounts[np.unique(cost[amounts], return_index=True)[1]][::-1]
    low, high, trial = 0, len(amounts), 0
    while low < high:
        runs = _Walk(stages, table).runs(int(amounts[trial]))
        yield runs
        if peak_of_runs(problem.graph, runs) <= problem.budget_bytes:
            low = trial + 1
        elif trial:
            high = trial
        if not low or now() > problem.until:
            return
        trial = (low + high) // 2


class Stages:
    """The forward pass in stages: what each saves for backward and what enters it, in slots, and its time."""

    def __init__(self, forward: Forward, most: int, slots: int) -> None:
        graph = forward.graph
        self.graph: Graph = graph
        self.forward = forward
        bounds = np.linspace(0, forward.turn + 1, min(forward.turn + 1, most) + 1).astype(int).tolist()
        ends = sorted({a + int(np.argmin(forward.width[a:b])) for a, b in pairwise(bounds)} | {forward.turn})
        starts = [0, *(end + 1 for end in ends[:-1])]
        producer: list[int] = graph.producer.tolist()
        stage_of = np.searchsorted(np.array(ends), np.arange(forward.turn + 1)).tolist() if ends else []
        self.members: list[list[int]] = [[] for _ in ends]
        """Tensors of each stage that can be made again, saved for backward or not."""
        self.wanted: list[tuple[int, ...]] = []
        """Those of them that backward reads."""
        replayable = graph.replayable
        for tensor, maker in enumerate(producer):
            if 0 <= maker <= forward.turn and replayable[maker]:
                self.members[stage_of[maker]].append(tensor)
        for members in self.members:
            self.wanted.append(tuple(tensor for tensor in members if forward.droppable[tensor]))
        self.entering = [set(), *(forward.crossing([end]) for end in ends[:-1])]
        size: list[int] = graph.tensor_bytes.tolist()
        saved = [sum(size[tensor] for tensor in wanted) for wanted in self.wanted]
        enters = [
            sum(size[tensor] for tensor in entering if replayable[producer[tensor]])
            for entering in self.entering
        ]
        unit = max(1.0, sum(saved) / slots)
        self.saved = [int(-(-each // unit)) for each in saved]
        self.enters = [int(-(-each // unit)) for each in enters]
        self.slots = sum(self.saved)
        self.ms = [
            float(graph.op_ms[a : b + 1][replayable[a : b + 1]].sum())
            for a, b in zip(starts, ends, strict=True)
        ]


class _Table:
    """`cost[s, t]` for each number of slots, and where the stretch is cut: at s all of stage s is kept."""

    def __init__(self, stages: Stages) -> None:
        count, slots = len(stages.saved), stages.slots
        self.cost: FloatColumn = np.zeros((count + 1, count, slots + 1))
        self.cut: IntColumn = np.zeros((count, count, slots + 1), dtype=np.int64)
        entered = np.zeros((count, count, slots + 1))
        """The cost where a checkpoint before stage s takes its slots."""
        forth_ms = np.cumsum([0.0, *stages.ms])
        for first in range(count - 1, -1, -1):
            for last in range(first, count):
                ways = np.empty((last - first + 1, slots + 1))
                ways[0] = stages.ms[first] + less_slots(self.cost[first + 1, last], stages.saved[first])
                np.add(entered[first + 1 : last + 1, last], self.cost[first, first:last], out=ways[1:])
                ways[1:] += (forth_ms[first + 1 : last + 1] - forth_ms[first])[:, None]
                best = ways.argmin(axis=0)
                self.cut[first, last] = first + best
                self.cost[first, last] = ways[best, np.arange(slots + 1)]
                entered[first, last] = less_slots(self.cost[first, last], stages.enters[first])


def less_slots(costs: FloatColumn, slots: int) -> FloatColumn:
    """The costs when `slots` are taken already."""
    moved = np.full(len(costs), np.inf)
    if slots < len(costs):
        moved[slots:] = costs[: len(costs) - slots]
    return moved


class _Walk:
    """The run sequence of one optimum."""

    def __init__(self, stages: Stages, table: _Table) -> None:
        self.stages, self.table = stages, table
        self.graph = graph = stages.graph
        self.maker: list[int] = graph.producer.tolist()
        self.following = stages.forward.turn + 1
        self.sequence = list(range(self.following))
        self.here = [0 <= maker < self.following for maker in self.maker]

    def runs(self, slots: int) -> list[int]:
        """First runs in order, and the reruns that the optimum for so many slots asks for."""
        graph = self.graph
        self._solve(0, len(self.stages.saved) - 1, slots, fresh=True)
        while self.following < graph.op_count:
            self._ask(graph.reads[self.following])
            self._backward()
        self._ask(tuple(np.flatnonzero(graph.kept & ~graph.resident).tolist()))
        return self.sequence

    def _solve(self, first: int, last: int, slots: int, *, fresh: bool) -> None:
        """Forth and back over some stages; `fresh`: forth is the first runs."""
        stages = self.stages
        if first > last:
            return
        cut = int(self.table.cut[first, last, slots])
        if cut == first:
            if not fresh:
                self._ask(stages.wanted[first])
            on = stages.entering[first + 1] if first < last else ()
            for tensor in stages.members[first]:
                if tensor not in on and not stages.forward.saved[tensor]:
                    self.here[tensor] = False
            self._solve(first + 1, last, slots - stages.saved[first], fresh=fresh)
            self._backward()
            return
        if not fresh:
            self._ask(tuple(sorted(stages.entering[cut])))
        for stage in range(first, cut):
            for tensor in stages.members[stage]:
                if tensor not in stages.entering[cut] and tensor not in stages.entering[first]:
                    self.here[tensor] = False
        self._solve(cut, last, slots - stages.enters[cut], fresh=fresh)
        for tensor in stages.members[cut - 1]:
            self.here[tensor] = False
        self._solve(first, cut - 1, slots, fresh=False)

    def _ask(self, tensors: tuple[int, ...]) -> None:
        self.sequence.extend(missing(self.graph, tensors, self.here, self.maker))

    def _backward(self) -> None:
        """Go on as long as all that is read is there."""
        graph, here = self.graph, self.here
        while self.following < graph.op_count and all(here[tensor] for tensor in graph.reads[self.following]):
            self.sequence.append(self.following)
            for tensor in graph.writes[self.following]:
                here[tensor] = True
            self.following += 1
