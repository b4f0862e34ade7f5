"""Capuchin (Peng et al., ASPLOS 2020): swaps that hide first, then the cheaper of an exposed swap and a recomputation.

Rule: candidates are tensors accessed twice whose span covers a moment above the budget. FreeTime = SwapInStart - SwapOutEnd;
by falling FreeTime, swap while it is positive. Then, for the rest, compare the exposed time of a swap with the recompute time
and take the cheaper; recompute targets by MSPS = bytes / recompute time, where a source that is itself dropped adds its own
time: the scores of all that depend on a pick are updated after it. In-triggers: the latest access before SwapInStart.
O(n^2) chain walks in the worst case. Differs: as few of the picks, in their order, are done as the judge finds to suffice
(Capuchin stops by its own count of bytes), and the run-time feedback on triggers is the enforcer's.
On graphs a heap orders the picks, only what is idle across the unplanned peak is recomputed, and of the prefixes that are tried
`_PREFIXES` are spread evenly. O(picks log picks + ops x tried prefixes).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from memopt.advisors.clock import OutOfTime, now
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
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import lifetimes, plain_runs
from memopt.advisors.graphs.schedule import Step
from memopt.advisors.profiles.picking import chain_given, prefix_that_suffices
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.registry import RECOMPUTES, REPLAYABLE, SWAPS, strategy
from memopt.estimators.simulator.chains import Chain
from memopt.estimators.simulator.decision import RECOMPUTE, Decision

_PREFIXES = 40
"""So many prefixes of the picks are tried until one keeps the budget; then those between it and the one before, by bisection."""

_Pick = tuple[Trip, bool]
"""An idle time, and whether it is spent on the host; otherwise the tensor is made again."""

capuchin = strategy(
    "capuchin",
    paper="Peng et al. 2020, Capuchin: Tensor-based GPU Memory Management for Deep Learning",
    needs=f"a link that is faster than the compute between two uses; {REPLAYABLE}",
    allows=SWAPS | RECOMPUTES,
)


@capuchin.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """The shortest prefix of the picks that fits."""
    yield prefix_that_suffices(problem, capuchin_picks(problem))


def capuchin_picks(problem: Problem) -> list[tuple[int, Decision]]:
    """All picks in Capuchin's order: hidden swaps, then exposed swaps and recomputations by what a byte costs."""
    over = problem.plain.high_bytes > problem.target_bytes
    rest = {c.storage: c for c in problem.candidates.values() if over[c.away].any()}
    picks: list[tuple[int, Decision]] = []
    for candidate in sorted(rest.values(), key=lambda c: -_free_ms(problem, c)):
        swap = candidate.option("swap")
        if swap is not None and _free_ms(problem, candidate) > 0:
            picks.append((candidate.storage, swap))
            del rest[candidate.storage]
    chosen = dict(picks)
    prices = {storage: _price(problem, candidate, chosen) for storage, candidate in rest.items()}
    while prices:
        if problem.seconds_left <= 0:
            raise OutOfTime
        storage = max(prices, key=lambda s: (rest[s].saved.size_bytes / (prices[s][0] + 1e-6), -s))
        decision = prices.pop(storage)[1]
        if decision is None:
            continue
        picks.append((storage, decision))
        chosen[storage] = decision
        for other in prices:
            chain = prices[other][2]
            if chain is not None and any(problem.view.value_storage[v] == storage for v in chain.sources):
                prices[other] = _price(problem, rest[other], chosen)
    return picks


def _free_ms(problem: Problem, candidate: Candidate) -> float:
    swap = candidate.option("swap")
    return problem.free_ms(candidate.saved, swap) if swap is not None else float("-inf")


def _price(
    problem: Problem, candidate: Candidate, chosen: Decisions
) -> tuple[float, Decision | None, Chain | None]:
    """(ms, the cheaper decision, its chain) given what is chosen already; decision None when there is neither."""
    swap = candidate.option("swap")
    swap_ms = -_free_ms(problem, candidate) if swap is not None else float("inf")
    chain = chain_given(problem, candidate, RECOMPUTE, chosen) if candidate.option("recompute") else None
    if chain is None:
        return swap_ms, swap, None
    replay_ms = problem.replay_ms(chain)
    return (replay_ms, RECOMPUTE, chain) if replay_ms <= swap_ms else (swap_ms, swap, chain)


@capuchin.graphs
def on_graph(problem: GraphProblem) -> Answer:
    """Capuchin (ASPLOS'20): hidden swaps by free time, then swap or recompute by memory saved per second."""
    walk = Walk(problem, plain_runs(problem.graph), [])
    forward = Forward(problem.graph)
    picks = in_order(problem, walk, forward)
    smallest = int(walk.memory.max())
    fewest, most, found = 0, 0, None
    for count in np.unique(np.linspace(0, len(picks), _PREFIXES + 1).astype(int))[1:].tolist():
        found, peak_bytes = _done(problem, forward, picks[:count])
        smallest = min(smallest, peak_bytes)
        most = count
        if found is not None or now() > problem.until:
            break
        fewest = count
    if found is None:
        raise problem.not_below(max(smallest, problem.budget_bytes + 1))
    while most - fewest > 1 and now() < problem.until:
        middle = (fewest + most) // 2
        trial, _ = _done(problem, forward, picks[:middle])
        found, most, fewest = (trial, middle, fewest) if trial is not None else (found, most, middle)
    return Answer(steps=found)


def in_order(problem: GraphProblem, walk: Walk, forward: Forward) -> list[_Pick]:
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


def _by_msps(problem: GraphProblem, walk: Walk, forward: Forward, trips: list[Trip]) -> list[_Pick]:
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
    picks: list[_Pick] = []
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


def _done(problem: GraphProblem, forward: Forward, picks: list[_Pick]) -> tuple[list[Step] | None, int]:
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
