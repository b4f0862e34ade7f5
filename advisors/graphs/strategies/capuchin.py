"""Capuchin (Peng et al., ASPLOS'20) on a plain graph.

Rule: candidates are tensors with an idle time across the over-budget interval. FreeTime = start of the way back - end of the way out; swaps are
taken by FreeTime, largest first, while it is positive. Then what is left goes by MSPS = bytes / ms, where ms is the cheaper of the exposed time of a
swap (-FreeTime) and the recompute time; a source that is away itself adds its own time, and each pick updates every MSPS that it changes.
What differs: planned at once from the graph, no feedback at run time (the judge's times are exact); of the picks, in their order, as
few are done as the judge finds to keep the budget, where Capuchin stops by its own count of bytes; only what is idle across the
unplanned peak is recomputed. O(picks log picks + ops x tried prefixes).
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.executors.segments import Forward, runs_keeping
from memopt.advisors.graphs.executors.swap_executor import (
    CannotHold,
    Trip,
    Walk,
    hold,
    idle_trips,
    just_in_time,
    on_runs,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem, infeasible, plain_answer
from memopt.advisors.graphs.runs import lifetimes, plain_runs
from memopt.advisors.graphs.schedule import Step

PREFIXES = 40
"""So many prefixes of the picks are tried until one keeps the budget; then those between it and the one before, by bisection."""

Pick = tuple[Trip, bool]
"""An idle time, and whether it is spent on the host; otherwise the tensor is made again."""


def capuchin(problem: GraphProblem) -> Answer:
    """Capuchin (ASPLOS'20): hidden swaps by free time, then swap or recompute by memory saved per second."""
    plain = plain_answer(problem)
    if plain is not None:
        return plain
    walk = Walk(problem, plain_runs(problem.graph), [])
    forward = Forward(problem.graph)
    picks = in_order(problem, walk, forward)
    smallest = int(walk.memory.max())
    fewest, most, found = 0, 0, None
    for count in np.unique(np.linspace(0, len(picks), PREFIXES + 1).astype(int))[1:].tolist():
        found, peak_bytes = _done(problem, forward, picks[:count])
        smallest = min(smallest, peak_bytes)
        most = count
        if found is not None or now() > problem.until:
            break
        fewest = count
    if found is None:
        raise infeasible(problem, max(smallest, problem.budget_bytes + 1))
    while most - fewest > 1 and now() < problem.until:
        middle = (fewest + most) // 2
        trial, _ = _done(problem, forward, picks[:middle])
        found, most, fewest = (trial, middle, fewest) if trial is not None else (found, most, middle)
    return Answer(steps=found)


def in_order(problem: GraphProblem, walk: Walk, forward: Forward) -> list[Pick]:
    """Every candidate in Capuchin's order, and what is done with it."""
    trips = [trip for trip in idle_trips(problem.graph, walk.runs) if _relieves(problem, walk, trip)]
    hidden: list[Trip] = []
    if problem.may_swap:
        trips.sort(key=lambda trip: -free_time(walk, trip))
        hidden = [trip for trip in trips if free_time(walk, trip) > 0]
    return [(trip, True) for trip in hidden] + _by_msps(problem, walk, forward, trips[len(hidden) :])


def free_time(walk: Walk, trip: Trip) -> float:
    """Time between the end of the way out and the start of the way back."""
    idle = float(walk.clock[trip.need] - walk.clock[trip.leave + 1])
    return idle - walk.out_ms(trip.tensor) - walk.in_ms(trip.tensor)


def _relieves(problem: GraphProblem, walk: Walk, trip: Trip) -> bool:
    return int(walk.memory[trip.leave + 1 : trip.need].max(initial=0)) > problem.budget_bytes


def _by_msps(problem: GraphProblem, walk: Walk, forward: Forward, trips: list[Trip]) -> list[Pick]:
    """The candidates whose swap would be seen, most bytes per ms first; as many as there is time for."""
    prices = _Prices(problem, walk, forward)
    heap: list[tuple[float, int, bool]] = []

    def offer(number: int) -> None:
        ms, swap = prices.of(trips[number], number)
        if ms < math.inf:
            heapq.heappush(heap, (-walk.size[trips[number].tensor] / (ms + 1e-9), number, swap))

    for number in range(len(trips)):
        if now() > problem.until:
            break
        offer(number)
    picks: list[Pick] = []
    left = set(range(len(trips)))
    while heap and now() < problem.until:
        score, number, swap = heapq.heappop(heap)
        trip = trips[number]
        if number not in left or score != -walk.size[trip.tensor] / (prices.now[number] + 1e-9):
            continue
        left.discard(number)
        picks.append((trip, swap))
        if not swap:
            prices.dropped.add(trip.tensor)
            for other in prices.made_from.pop(trip.tensor, set()) & left:
                offer(other)
    return picks


class _Prices:
    """What each candidate costs, given what is dropped already."""

    def __init__(self, problem: GraphProblem, walk: Walk, forward: Forward) -> None:
        self.problem, self.walk, self.forward = problem, walk, forward
        self.maker: list[int] = problem.graph.producer.tolist()
        self.last: list[int] = lifetimes(problem.graph)[1].tolist()
        self.dropped: set[int] = set()
        self.made_from: dict[int, set[int]] = {}
        """By tensor that is there, the candidates that are made from it."""
        self.now: dict[int, float] = {}

    def of(self, trip: Trip, number: int) -> tuple[float, bool]:
        """Time that is seen, and whether it is a swap's."""
        swap_ms = max(0.0, -free_time(self.walk, trip)) if self.problem.may_swap else math.inf
        again_ms = math.inf
        if self.problem.may_recompute and self.forward.droppable[trip.tensor]:
            again_ms = self._again_ms(trip, number)
        self.now[number] = min(swap_ms, again_ms)
        return self.now[number], swap_ms < again_ms

    def _again_ms(self, trip: Trip, number: int) -> float:
        """Time of the ops that make the tensor from what is there when it is needed."""
        graph, maker = self.problem.graph, self.maker
        ops: set[int] = set()
        pending = [maker[trip.tensor]]
        while pending:
            op = pending.pop()
            if op in ops:
                continue
            ops.add(op)
            for source in graph.reads[op]:
                if (source in self.dropped or self.last[source] < trip.need) and graph.replayable[
                    maker[source]
                ]:
                    pending.append(maker[source])
                else:
                    self.made_from.setdefault(source, set()).add(number)
        return float(graph.op_ms[sorted(ops)].sum())


def _done(problem: GraphProblem, forward: Forward, picks: list[Pick]) -> tuple[list[Step] | None, int]:
    """The schedule of these picks, None where they do not keep the budget; and the peak that they need."""
    graph = problem.graph
    dropped = {trip.tensor for trip, swap in picks if not swap}
    runs = runs_keeping(forward, set(range(graph.tensor_count)) - dropped) if dropped else plain_runs(graph)
    trips = on_runs(graph, runs, [trip for trip, swap in picks if swap])
    peak_bytes = int(Walk(problem, runs, trips).memory.max())
    try:
        return hold(problem, runs, trips, just_in_time), peak_bytes
    except CannotHold as failure:
        return None, max(peak_bytes, failure.peak_bytes)
