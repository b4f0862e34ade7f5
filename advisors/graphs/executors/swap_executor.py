"""Turning a choice of copies into a valid schedule: the executor under every published swap strategy.

A strategy says which tensors leave after which run and before which run they are needed back; a prefetch rule says where it would like
the way back to start. The executor walks the runs with a clock for each lane. A way back is put off while it does not fit
(an `in` does not wait, a run does), and a run that would exceed the budget waits for copies in flight, as the form has it.
What the form cannot say, and the strategies here therefore do not do: a run that waits although memory is not short.
O(runs + trips) per walk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memopt.advisors.graphs.graph import Graph, IntColumn
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import frees_after, memory_of_runs, plain_peak
from memopt.advisors.graphs.schedule import FREE, IN, OUT, RUN, Step


@dataclass(frozen=True, slots=True)
class Trip:
    """`tensor` leaves after the run at position `leave` and is needed by the run at position `need` (`len(runs)`: the end)."""

    tensor: int
    leave: int
    need: int


Prefetch = Callable[["Walk", Trip], int]
"""Position of the run before which the way back should start."""


Copies = tuple[list[Trip], Prefetch]
"""What leaves when, and where it would like its way back to start."""


class CannotHold(Exception):
    """The copies do not keep the budget; `peak_bytes` is what they would need."""

    def __init__(self, peak_bytes: int) -> None:
        super().__init__(peak_bytes)
        self.peak_bytes = peak_bytes


def idle_trips(graph: Graph, runs: list[int], least_bytes: int = 1) -> list[Trip]:
    """For each tensor, its longest idle time (between two runs that touch it), where it has one, in order of leaving."""
    clock = clock_of(graph, runs)
    last_touch: dict[int, int] = {}
    best: dict[int, tuple[float, Trip]] = {}
    size: list[int] = graph.tensor_bytes.tolist()

    def touch(tensor: int, position: int) -> None:
        before = last_touch.get(tensor)
        if before is not None and position > before + 1 and size[tensor] >= least_bytes:
            idle = float(clock[position] - clock[before + 1])
            if tensor not in best or idle > best[tensor][0]:
                best[tensor] = (idle, Trip(tensor, before, position))
        last_touch[tensor] = position

    for position, op in enumerate(runs):
        for tensor in graph.reads[op]:
            touch(tensor, position)
        for tensor in graph.writes[op]:
            last_touch[tensor] = position
    for tensor in np.flatnonzero(graph.kept & ~graph.resident).tolist():
        touch(tensor, len(runs))
    return sorted((trip for _, trip in best.values()), key=lambda trip: (trip.leave, trip.need))


def on_runs(graph: Graph, runs: list[int], trips: list[Trip]) -> list[Trip]:
    """Trips on the plain sequence, moved to a longer one: they leave after the last run that touches them before the need."""
    first: dict[int, int] = {}
    moving = {trip.tensor for trip in trips}
    touches: dict[int, list[int]] = {tensor: [] for tensor in moving}
    for position, op in enumerate(runs):
        first.setdefault(op, position)
        for tensor in moving.intersection(graph.reads[op] + graph.writes[op]):
            touches[tensor].append(position)
    first[graph.op_count] = len(runs)
    found = []
    for trip in trips:
        need = first[trip.need]
        leave = touches[trip.tensor][bisect_left(touches[trip.tensor], need) - 1]
        if leave + 1 < need:
            found.append(Trip(trip.tensor, leave, need))
    return found


def clock_of(graph: Graph, runs: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Start of each run, and last the end, when nothing waits."""
    clock = np.zeros(len(runs) + 1)
    np.cumsum(graph.op_ms[np.array(runs, dtype=np.int64)], out=clock[1:])
    return clock


class Walk:
    """One choice of trips on one run sequence."""

    def __init__(self, problem: GraphProblem, runs: list[int], trips: Sequence[Trip]) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.runs = runs
        self.trips = list(trips)
        self.size: list[int] = self.graph.tensor_bytes.tolist()
        self.clock = clock_of(self.graph, runs)
        self.memory: IntColumn = memory_of_runs(self.graph, runs)
        for trip in self.trips:
            self.memory[trip.leave + 1 : trip.need] -= self.size[trip.tensor]

    def out_ms(self, tensor: int) -> float:
        """Length of the way out."""
        return self.size[tensor] / (self.problem.out_gbps * 1e6)

    def in_ms(self, tensor: int) -> float:
        """Length of the way back."""
        return self.size[tensor] / (self.problem.in_gbps * 1e6)

    def until_it_fits(self, trips: Iterable[Trip]) -> list[Trip]:
        """Those of `trips`, one after the other, that are away where the budget is exceeded, until it is not; `memory` goes down by them."""
        budget = self.problem.budget_bytes
        chosen: list[Trip] = []
        for trip in trips:
            if int(self.memory.max()) <= budget:
                break
            span = self.memory[trip.leave + 1 : trip.need]
            if int(span.max(initial=0)) > budget:
                span -= self.size[trip.tensor]
                chosen.append(trip)
        return chosen

    def steps(self, prefetch: Prefetch) -> list[Step]:
        """A valid schedule, or `CannotHold`."""
        budget = self.problem.budget_bytes
        if int(self.memory.max()) > budget:
            raise CannotHold(int(self.memory.max()))
        backs = self._backs(prefetch)
        return _Lanes(self, backs).walk()

    def _backs(self, prefetch: Prefetch) -> dict[int, list[Trip]]:
        """Trips by the position at which their way back starts: where the rule wants it, later where memory is short."""
        memory = self.memory.copy()
        budget = self.problem.budget_bytes
        found: dict[int, list[Trip]] = {}
        for trip in sorted(self.trips, key=lambda trip: trip.need):
            size = self.size[trip.tensor]
            back = min(max(prefetch(self, trip), trip.leave + 1), trip.need)
            short = np.flatnonzero(memory[back : trip.need] + size > budget)
            if len(short):
                back += int(short[-1]) + 1
            memory[back : trip.need] += size
            found.setdefault(back, []).append(trip)
        return found


class _Lanes:
    def __init__(self, walk: Walk, backs: dict[int, list[Trip]]) -> None:
        self.walk_ = walk
        self.backs = backs
        self.steps: list[Step] = []
        self.now = self.out_free = 0.0
        self.flying: deque[tuple[float, int]] = deque()
        self.out_end: dict[int, float] = {}
        self.used = walk.graph.resident_bytes
        self.due: list[Trip] = []

    def walk(self) -> list[Step]:
        walk = self.walk_
        graph, size = walk.graph, walk.size
        leaving: dict[int, list[int]] = {}
        for trip in walk.trips:
            leaving.setdefault(trip.leave, []).append(trip.tensor)
        op_ms: list[float] = graph.op_ms.tolist()
        workspace: list[int] = graph.op_workspace_bytes.tolist()
        here = [False] * graph.tensor_count
        self.in_free = 0.0
        self.arrival: dict[int, float] = {}
        for position, (op, dying) in enumerate(zip(walk.runs, frees_after(graph, walk.runs), strict=True)):
            self._bring_back(position)
            start = max([self.now, *(self.arrival.pop(tensor, 0.0) for tensor in graph.reads[op])])
            need = workspace[op] + sum(size[tensor] for tensor in graph.writes[op])
            self._land(start)
            while self.used + need > walk.problem.budget_bytes and self.flying:
                start = self.flying[0][0]
                self._land(start)
            self.used += sum(size[tensor] for tensor in graph.writes[op] if not here[tensor])
            for tensor in graph.writes[op]:
                here[tensor] = True
            self.now = start + op_ms[op]
            self.steps.append((RUN, op))
            for tensor in dying:
                here[tensor] = False
                self.used -= size[tensor]
                self.steps.append((FREE, tensor))
            for tensor in leaving.get(position, ()):
                self.out_free = max(self.now, self.out_free) + walk.out_ms(tensor)
                self.out_end[tensor] = self.out_free
                self.flying.append((self.out_free, tensor))
                self.steps.append((OUT, tensor))
        self._bring_back(len(walk.runs))
        return self.steps

    def _land(self, now: float) -> None:
        while self.flying and self.flying[0][0] <= now:
            self.used -= self.walk_.size[self.flying.popleft()[1]]

    def _bring_back(self, position: int) -> None:
        """Start the ways back that are due and fit; `CannotHold` when one is needed now and does not."""
        walk = self.walk_
        self.due.extend(self.backs.get(position, ()))
        if not self.due:
            return
        self.due.sort(key=lambda trip: trip.need)
        self._land(self.now)
        waiting: list[Trip] = []
        for trip in self.due:
            size = walk.size[trip.tensor]
            landed = self.out_end[trip.tensor] <= self.now * (1 - 1e-12)
            fits = self.used + size <= walk.problem.budget_bytes
            if landed and fits and not waiting:
                self.in_free = max(self.now, self.in_free) + walk.in_ms(trip.tensor)
                self.arrival[trip.tensor] = self.in_free
                self.used += size
                self.steps.append((IN, trip.tensor))
            elif trip.need <= position:
                raise CannotHold(self.used + size)
            else:
                waiting.append(trip)
        self.due = waiting


def just_in_time(walk: Walk, trip: Trip) -> int:
    """So that the way back ends when the tensor is needed, were the lane free."""
    start = float(walk.clock[trip.need]) - walk.in_ms(trip.tensor)
    return int(bisect_right(walk.clock, start)) - 1


def as_soon_as_possible(walk: Walk, trip: Trip) -> int:
    """Right after it left: memory decides."""
    return trip.leave + 1


def ahead(positions: int) -> Prefetch:
    """A fixed number of runs before the need."""

    def rule(walk: Walk, trip: Trip) -> int:
        return trip.need - positions

    return rule


def best_walk(problem: GraphProblem, choices: Iterable[tuple[list[int], Sequence[Trip], Prefetch]]) -> Answer:
    """The cheapest schedule among choices of runs, trips and a prefetch rule; `BudgetInfeasible` when none is valid."""
    best: tuple[float, list[Step]] | None = None
    smallest = plain_peak(problem.graph)
    for runs, trips, prefetch in choices:
        if trips and not problem.may_swap:
            continue
        try:
            steps = hold(problem, runs, trips, prefetch)
        except CannotHold as failure:
            if failure.peak_bytes > problem.budget_bytes:
                smallest = min(smallest, failure.peak_bytes)
            continue
        overhead = problem.replay(steps).overhead
        if best is None or overhead < best[0]:
            best = (overhead, steps)
    if best is None:
        raise problem.not_below(max(smallest, problem.budget_bytes + 1))
    return Answer(steps=best[1])


def hold(problem: GraphProblem, runs: list[int], trips: Sequence[Trip], prefetch: Prefetch) -> list[Step]:
    """A valid schedule; trips that are too short for their own copies are left out first, if memory allows."""
    walk = Walk(problem, runs, trips)
    if int(walk.memory.max()) > problem.budget_bytes:
        raise CannotHold(int(walk.memory.max()))
    try:
        return walk.steps(prefetch)
    except CannotHold:
        long = [
            trip
            for trip in walk.trips
            if float(walk.clock[trip.need] - walk.clock[trip.leave + 1])
            > walk.out_ms(trip.tensor) + walk.in_ms(trip.tensor)
        ]
        return Walk(problem, runs, long).steps(just_in_time)
