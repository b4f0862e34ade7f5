"""Plans in which runs may wait for copies: what `auto` falls back on where hidden copies and recomputation do not meet the budget.

Starts from every published swap strategy and climbs: leave one trip out or put one in, at random, judged by replay. O(ops) per try.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from memopt.advisors.clock import now
from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.bounds.moments import overhead_bound
from memopt.advisors.graphs.executors.swap_executor import (
    CannotHold,
    Trip,
    Walk,
    as_soon_as_possible,
    hold,
    just_in_time,
)
from memopt.advisors.graphs.problem import SWAP, GraphProblem
from memopt.advisors.graphs.schedule import OUT, RUN, Step
from memopt.advisors.graphs.search.starts import FEW, IN_ANY_CASE_S
from memopt.advisors.registry import graph_strategies
from memopt.advisors.size_classes import pool_of
from memopt.errors import BudgetInfeasible, NotPossibleHere

JOINT = ("superneurons", "capuchin")
SWAP_ONLY = (
    "modnn",
    "autoswap",
    "vdnn",
    "vdnn++",
    "flashneuron",
    "tflms",
    "sentinel",
    "swapadvisor",
    "autotm",
)


class Waiting:
    """The best plan with waits so far; `smallest_bytes` is the least peak that any of them could reach."""

    def __init__(self, problem: GraphProblem) -> None:
        self.problem = problem
        self.best: tuple[float, list[Step]] | None = None
        self.smallest_bytes = 2**62

    def try_peers(self, until: float, beaten: float = math.inf) -> None:
        """Every published strategy that may wait, but those that cannot undercut the overhead `beaten`; in any case those that are quick."""
        by_swaps = overhead_bound(replace(self.problem, allow=frozenset({SWAP})))
        for peer in JOINT + (SWAP_ONLY if by_swaps < beaten else ()):
            moment, end = now(), min(until, self.problem.until)
            quick = peer in JOINT or self.problem.graph.op_count <= FEW
            if not quick and moment > until:
                return
            if peer in JOINT:
                end = max(end, moment + IN_ANY_CASE_S)
            try:
                self._note(graph_strategies()[peer].answer(replace(self.problem, until=end)).steps)
            except NotPossibleHere:
                continue
            except BudgetInfeasible as failure:
                self.smallest_bytes = min(self.smallest_bytes, failure.min_peak_bytes)

    def climb(self, until: float) -> None:
        """Change the set of trips at random while that helps."""
        problem = self.problem
        board = GraphBoard(problem)
        runs, everything = board.runs, board.trips
        if not everything:
            return
        rnd = random.Random(0)
        current = self._trips_of_best(everything) or [
            everything[number] for number in pool_of(board).leaving()
        ]
        worth = self._worth(runs, current)
        while now() < until:
            changed = set(current)
            for trip in rnd.sample(everything, min(len(everything), rnd.choice((1, 1, 2, 3)))):
                changed ^= {trip}
            trial = sorted(changed, key=lambda trip: (trip.leave, trip.need))
            value = self._worth(runs, trial)
            if value <= worth:
                current, worth = trial, value

    def _worth(self, runs: list[int], trips: list[Trip]) -> float:
        walk = Walk(self.problem, runs, trips)
        peak = int(walk.memory.max())
        if peak > self.problem.budget_bytes:
            return 1e9 + peak
        self.smallest_bytes = min(self.smallest_bytes, peak)
        found = 1e9
        for prefetch in (just_in_time, as_soon_as_possible):
            try:
                found = min(found, self._note(hold(self.problem, runs, trips, prefetch)))
            except CannotHold as failure:
                found = min(found, 1e6 + failure.peak_bytes)
        return found

    def _note(self, steps: list[Step]) -> float:
        overhead = self.problem.replay(steps).overhead
        if self.best is None or overhead < self.best[0]:
            self.best = (overhead, steps)
        return overhead

    def _trips_of_best(self, everything: list[Trip]) -> list[Trip]:
        if self.best is None:
            return []
        steps = self.best[1]
        if sum(verb == RUN for verb, _ in steps) != self.problem.graph.op_count:
            return []
        out = {what for verb, what in steps if verb == OUT}
        return [trip for trip in everything if trip.tensor in out]
