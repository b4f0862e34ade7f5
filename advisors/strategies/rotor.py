"""Rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, arXiv 1911.13214): optimal checkpoints on a chain of unlike stages.

Rule: C(s, t, m), the least time for stages s..t of a chain forth and back in m bytes when what enters s is there, is the less of
keeping all that stage s saves, F(s) + C(s+1, t, m - saved(s)), and of keeping only what enters a later stage c,
F(s..c-1) + C(c, t, m - enters(c)) + C(s, c-1, m), over all c: stretches nest. Exact for a chain, for every amount of memory at once, in
some hundred slots, as in the paper. Differs: a net is no chain, so stages end where the fewest bytes pass, and all that passes such a
place is its checkpoint; of the optima for all amounts of memory, the cheapest that the judge finds to fit is taken.
On profiles a stretch runs again once, when backward comes to it, with room for all that it saves beside what is kept before it: the
enforcer keeps what has come back, so stretches do not nest. O(stages^2 x slots).
On graphs they nest, what a stretch lacks besides is made on demand, and the "forward pass" is what precedes the unplanned peak
(`executors/nested`). Where wide edges pass every place the plan is poor, or there is none. O(stages^3 x slots).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.executors.nested import ForwardStages, Walk, narrow_ends
from memopt.advisors.graphs.executors.segments import Forward
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import peak_of_runs
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.profiles.starts.checkpoints import Order
from memopt.advisors.registry import RECOMPUTES, REPLAYABLE, strategy
from memopt.estimators.simulator.decision import RECOMPUTE
from memopt.estimators.simulator.trace_view import Floats, Ints

_MOST_STAGES = 80
"""Longer chains are cut into so many stages: the table takes the square of their number for each slot."""
_SLOTS = 240
"""Units that memory is counted in: some hundred, as in the paper."""
_MOST_PLANS = 60
"""Amounts of memory, of all the table knows, whose plans are judged."""

_SIZES = ((40, 120), (100, 200))
"""For graphs, most stages, and about how many slots: few at first, since the table takes the cube of the stages."""
_AMOUNTS = 40
"""Amounts of memory among which the most that fits a graph is searched by halves."""

Stretch = tuple[int, int]
"""Stages from the first up to, not including, the second."""

rotor = strategy(
    "rotor",
    paper="Beaumont et al. 2019, Optimal Checkpointing for Heterogeneous Chains",
    needs=f"{REPLAYABLE}, in a net that is nearly a chain",
    allows=RECOMPUTES,
)


@rotor.profiles
def rotor_plans(problem: Problem) -> Iterator[Decisions]:
    """The optimum for each amount of memory, the most memory first, without repetition. They are the same under any budget."""
    key = "rotor", problem.allow, problem.device, frozenset(problem.candidates)
    found: list[Decisions] | None = problem.view.shared.get(key)
    if found is None:
        found = problem.view.shared[key] = list(_optimal_plans(problem))
    yield from found


def _optimal_plans(problem: Problem) -> Iterator[Decisions]:
    stages = Stages(problem)
    seen: set[frozenset[int]] = set()
    for stretches in optima(stages.saved_bytes, stages.enters_bytes, stages.again_ms):
        dropped = stages.dropped(stretches)
        if dropped not in seen:
            seen.add(dropped)
            yield dict.fromkeys(sorted(dropped), RECOMPUTE)


def optima(saved_bytes: list[int], enters_bytes: list[int], again_ms: list[float]) -> Iterator[list[Stretch]]:
    """For falling amounts of memory, the stretches of stages that run again at the least cost."""
    if not sum(saved_bytes):
        return
    unit = sum(saved_bytes) / _SLOTS
    table = _Table(
        [-int(-size // unit) for size in saved_bytes],
        [-int(-size // unit) for size in enters_bytes],
        again_ms,
    )
    for slots in np.unique(np.linspace(0, table.slots, _MOST_PLANS).astype(int))[::-1].tolist():
        found = table.read(slots)
        if found is not None:
            yield found


def less_slots(costs: Floats, slots: int) -> Floats:
    """The costs when `slots` are taken already."""
    moved = np.full(len(costs), np.inf)
    if slots < len(costs):
        moved[slots:] = costs[: len(costs) - slots]
    return moved


class _Table:
    """Least cost from each stage on for each number of slots left; two cases: has what enters the stage been kept already?"""

    def __init__(self, saved: list[int], enters: list[int], again_ms: list[float]) -> None:
        self.saved, self.enters = saved, enters
        self.slots = sum(saved)
        count = len(saved)
        self.cost: list[list[Floats]] = [[np.zeros(self.slots + 1)] * (count + 1) for _ in range(2)]
        self.next: list[list[Ints]] = [[np.zeros(0, dtype=np.int64)] * count for _ in range(2)]
        """The stage at which the stretch that begins here ends; the stage itself: it is kept."""
        for at in range(count - 1, -1, -1):
            for case in range(2):
                entering = enters[at] if case else 0
                best = less_slots(self.cost[0][at + 1], saved[at])
                taken = np.full(self.slots + 1, at)
                room, ms = entering, 0.0
                for end in range(at + 1, count + 1):
                    room += saved[end - 1]
                    ms += again_ms[end - 1]
                    trial = ms + less_slots(self.cost[1][end], entering)
                    trial[:room] = np.inf
                    taken = np.where(trial < best, end, taken)
                    best = np.minimum(trial, best)
                self.cost[case][at], self.next[case][at] = best, taken

    def read(self, slots: int) -> list[Stretch] | None:
        """The stretches of the optimum; None when there is none in so little memory."""
        if not np.isfinite(self.cost[0][0][slots]):
            return None
        at, case, found = 0, 0, []
        while at < len(self.saved):
            end = int(self.next[case][at][slots])
            if end == at:
                slots -= self.saved[at]
                at, case = at + 1, 0
                continue
            slots -= self.enters[at] if case else 0
            found.append((at, end))
            at, case = end, 1
        return found


class Stages:
    """The recomputable storages, cut into stages at narrow places."""

    def __init__(self, problem: Problem) -> None:
        view = problem.view
        order = Order(problem)
        ends = _narrow_places(problem, order)
        starts = [0, *(end + 1 for end in ends)]
        self.members = [order.storages[a : b + 1] for a, b in zip(starts, ends, strict=False)]
        self.crossing = [frozenset(), *(order.crossing([end]) for end in ends)]
        """What enters each stage, of what can be made again."""
        size = view.size
        self.saved_bytes = [sum(int(size[s]) for s in members) for members in self.members]
        self.enters_bytes = [sum(int(size[s]) for s in crossing) for crossing in self.crossing][: len(ends)]
        made = [-1, *(order.made[end] for end in ends)]
        self.again_ms = [
            sum(view.replay_ms[op] for op in range(a + 1, b + 1) if view.replayable[op])
            for a, b in pairwise(made)
        ]

    def dropped(self, stretches: list[Stretch]) -> frozenset[int]:
        """Storages that go: those made in the stretches, without what enters any of them."""
        gone = {s for first, last in stretches for members in self.members[first:last] for s in members}
        for first, _ in stretches:
            gone -= self.crossing[first]
        return frozenset(gone)


def _narrow_places(problem: Problem, order: Order) -> list[int]:
    """Positions of the last storage of each stage: of equal parts the place that the fewest bytes cross, and the very last."""
    n = len(order.storages)
    if n == 0:
        return []
    change = np.zeros(n + 1, dtype=np.int64)
    for position, (storage, size) in enumerate(zip(order.storages, order.sizes, strict=True)):
        change[position] += size
        change[max(position, bisect_left(order.made, order.last_read.get(storage, -1)))] -= size
    return narrow_ends(np.cumsum(change)[:n], _MOST_STAGES)


@rotor.graph_runs
def nested(problem: GraphProblem) -> Iterator[list[int]]:
    """Rotor (2019): optimal nested checkpoints by dynamic programming, where the graph is nearly a chain.

    For few stages, then for many: for the least memory, and where that meets the budget for more, until the most that does is found."""
    forward = Forward(problem.graph)
    for most_stages, slots in _SIZES:
        if now() > problem.until:
            return
        stages = ForwardStages(forward, most_stages, slots)
        if stages.slots:
            yield from _by_memory(problem, stages)
        if forward.turn < most_stages:
            return


def _by_memory(problem: GraphProblem, stages: ForwardStages) -> Iterator[list[int]]:
    table = _NestedTable(stages)
    cost = table.cost[0, len(stages.saved) - 1]
    amounts = np.unique(np.linspace(0, stages.slots, _AMOUNTS).astype(int))
    amounts = amounts[np.isfinite(cost[amounts])]
    amounts = amounts[np.unique(cost[amounts], return_index=True)[1]][::-1]
    low, high, trial = 0, len(amounts), 0
    while low < high:
        runs = Walk(stages, table.cut).runs(int(amounts[trial]))
        yield runs
        if peak_of_runs(problem.graph, runs) <= problem.budget_bytes:
            low = trial + 1
        elif trial:
            high = trial
        if not low or now() > problem.until:
            return
        trial = (low + high) // 2


class _NestedTable:
    """`cost[s, t]` for each number of slots, and where the stretch is cut: at s all of stage s is kept."""

    def __init__(self, stages: ForwardStages) -> None:
        count, slots = len(stages.saved), stages.slots
        self.cost: Floats = np.zeros((count + 1, count, slots + 1))
        self.cut: Ints = np.zeros((count, count, slots + 1), dtype=np.int64)
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
