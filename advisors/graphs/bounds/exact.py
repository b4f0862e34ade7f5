"""A linear program below every plan without copies (with them: `bound_with_copies`): what HiGHS proves with it, and the plans that it suggests.

Moments are first runs of chosen ops. S[j,v]: tensor v is on the device right after moment j. R[j,i]: op i runs again between moments j and
j+1. Any schedule gives such values, however often ops run within an interval, since only this is asked: what an interval's
first runs and reruns read was there when it began or is made in it; what is there when it ends was there or is made in it; and during
the first run at a moment its reads, its writes, its workspace and whatever is there before and after fit in the budget. So the least
time of all R is below the rerun time of any plan. With every op a moment this is Checkmate's program without the memory inside
a stage; with six moments it has a few thousand variables for graphs of a thousand ops, and proves more in the same time. Tensors that are
small are left out, which only lowers the bound. Needs `highspy`; without it there is no such bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.program import RunProgram, last_service
from memopt.advisors.graphs.executors.segments import missing
from memopt.advisors.graphs.graph import IntColumn
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import Swap, plain_memory

SMALL = 0.001
"""Tensors below this share of the budget are left out."""
MOST_VARIABLES = 40_000
"""A larger program is not even relaxed: HiGHS would spend the time on setting it up."""
MOST_WHOLE = 6_000
"""Of variables: larger programs are solved relaxed, not in whole numbers too."""
EVERY_OP = 3_000
"""With fewer variables than this, every op is a moment too."""
CHOICES = ((6, False), (6, True), (10, False), (16, True))
"""Numbers of moments; and whether each is the op with the largest working set of its stretch, or they lie evenly."""
MOST_OPS = 20_000
"""Larger graphs have no bound by programs, whose set-up would take the search's time."""
SLACK = 1e-6
"""HiGHS' own tolerance, relative and in ms: a bound must not lie above the optimum by it."""

Start = tuple[list[int], frozenset[Swap]]
"""A run sequence, and swaps."""


@dataclass(slots=True)
class Proof:
    """No plan costs less than `bound_ms`; run sequences and swaps to start from (memory may be short)."""

    bound_ms: float = 0.0
    starts: list[Start] = field(default_factory=list)


def prove(problem: GraphProblem, limit_s: float, kind: type[Relaxed]) -> Proof:
    """The best bound that a few choices of moments give within the time."""
    proof = Proof()
    if not find_spec("highspy") or problem.graph.op_count > MOST_OPS:
        return proof
    best: dict[bool, tuple[float, Relaxed]] = {}
    begin = now()
    for largest, moments in choices(problem):
        if now() > begin + limit_s / 2:
            break
        relaxed = kind(problem, moments)
        if relaxed.size() > MOST_VARIABLES:
            continue
        bound_ms = relaxed.lower_bound(limit_s / 4)
        proof.bound_ms = max(proof.bound_ms, bound_ms)
        if len(relaxed.program.cost) <= MOST_WHOLE and bound_ms >= best.get(largest, (0.0,))[0]:
            best[largest] = bound_ms, relaxed
    for _, relaxed in best.values():
        highs = relaxed.program.solver(limit_s / 3)
        highs.run()
        info = highs.getInfo()
        if np.isfinite(info.mip_dual_bound):
            proof.bound_ms = max(proof.bound_ms, float(info.mip_dual_bound))
        if info.primal_solution_status == 2:
            proof.starts.append(relaxed.start(highs.getSolution().col_value))
    proof.bound_ms = max(0.0, (1 - SLACK) * proof.bound_ms - SLACK)
    return proof


def choices(problem: GraphProblem) -> list[tuple[bool, list[int]]]:
    """The sets of moments to try, and whether they are the largest ops of their stretches."""
    graph = problem.graph
    plain = plain_memory(graph)[:-1]
    own: IntColumn = graph.op_workspace_bytes.copy()
    for op in range(graph.op_count):
        own[op] += sum(int(graph.tensor_bytes[tensor]) for tensor in {*graph.reads[op], *graph.writes[op]})
    short = np.flatnonzero(plain > problem.budget_bytes)
    every = list(range(graph.op_count))
    found = []
    for count, largest in CHOICES:
        if largest:
            parts = [part for part in np.array_split(short, count) if len(part)]
            found.append((True, sorted({int(part[np.argmax(own[part])]) for part in parts})))
        else:
            chosen = np.unique(np.linspace(0, graph.op_count - 1, count).astype(np.int64))
            found.append((False, chosen.tolist()))
    if Relaxed(problem, every).size() <= EVERY_OP:
        found.append((False, every))
    return found


class Relaxed:
    """The program for one problem."""

    def __init__(self, problem: GraphProblem, moments: list[int]) -> None:
        self.graph = graph = problem.graph
        budget_bytes = problem.budget_bytes
        self.unit = float(max(1, budget_bytes))
        self.program = RunProgram(graph=graph, budget_bytes=budget_bytes)
        self.latest = last_service(graph, graph.op_count)
        large = (graph.producer >= 0) & (graph.tensor_bytes > SMALL * budget_bytes)
        self.large: list[bool] = large.tolist()
        self.maker: list[int] = graph.producer.tolist()
        self.tensors: list[int] = np.flatnonzero(large).tolist()
        self.moments = moments

    def size(self) -> int:
        """About how many variables there will be."""
        moments = np.array([*self.moments, self.graph.op_count])
        makers = np.array([self.maker[tensor] for tensor in self.tensors], dtype=np.int64)
        latest = np.array([self.latest[maker] for maker in makers.tolist()], dtype=np.int64)
        return 2 * int((np.searchsorted(moments, latest) - np.searchsorted(moments, makers)).sum())

    def build(self) -> None:
        """All variables and rows."""
        graph = self.graph
        begin = -1
        for index, op in enumerate(self.moments):
            self._interval(index, begin, op)
            begin = op
        self._reruns(len(self.moments), begin)
        for first in range(begin + 1, graph.op_count):
            self._reads(len(self.moments), begin, first, None)
        for tensor in self.tensors:
            if graph.kept[tensor] and self.maker[tensor] <= begin:
                self._there(len(self.moments), tensor, None)

    def _interval(self, index: int, begin: int, op: int) -> None:
        """Runs after the first run of `begin` up to the first run of `op`, and what is there then."""
        self._reruns(index, begin)
        for first in range(begin + 1, op + 1):
            self._reads(index, begin, first, None)
        self._stored(index, begin, op)

    def _reruns(self, index: int, begin: int) -> None:
        graph, program = self.graph, self.program
        makers = {self.maker[tensor] for tensor in self.tensors}
        again = sorted(
            op for op in makers if op <= begin and graph.replayable[op] and self.latest[op] > begin
        )
        for op in again:
            program.runs[index, op] = program.column(float(graph.op_ms[op]), whole=True)
        for op in again:
            self._reads(index, begin, op, program.runs[index, op])

    def _reads(self, index: int, begin: int, op: int, run: int | None) -> None:
        for tensor in self.graph.reads[op]:
            if self.large[tensor] and self.maker[tensor] <= begin:
                self._there(index, tensor, run)

    def _there(self, index: int, tensor: int, run: int | None) -> None:
        """If `run` (or in any case), the tensor was there when the interval began or is made in it."""
        program = self.program
        terms = {} if run is None else {run: 1.0}
        for source in self._sources(index, tensor):
            terms[source] = terms.get(source, 0.0) - 1.0
        program.row(terms, high=0.0 if run is not None else -1.0)

    def _sources(self, index: int, tensor: int) -> list[int]:
        """Where the tensor can be had in this interval: it was there, or is made."""
        program = self.program
        found = (program.stored.get((index, tensor)), program.runs.get((index, self.maker[tensor])))
        return [source for source in found if source is not None]

    def _stored(self, index: int, begin: int, op: int) -> None:
        """What is there after the first run of `op`, and that it fits beside what that op needs."""
        graph, program = self.graph, self.program
        own = {*graph.reads[op], *graph.writes[op]}
        room = self.program.budget_bytes - graph.resident_bytes - int(graph.op_workspace_bytes[op])
        room -= sum(int(graph.tensor_bytes[tensor]) for tensor in own)
        beside: dict[int, float] = {}
        for tensor in self.tensors:
            maker = self.maker[tensor]
            if maker > op or self.latest[maker] <= op:
                continue
            stored = program.column(0.0, whole=True)
            program.stored[index + 1, tensor] = stored
            if tensor not in own:
                beside[stored] = float(graph.tensor_bytes[tensor]) / self.unit
            if maker <= begin:
                self._there(index, tensor, stored)
        program.row(beside, high=max(0.0, room / self.unit))

    def lower_bound(self, limit_s: float = 10.0) -> float:
        """Least rerun time (ms) of the linear relaxation; 0 when it was not solved in time."""
        solved = self.relaxation(limit_s)
        return float(solved.getInfo().objective_function_value) if solved is not None else 0.0

    def relaxation(self, limit_s: float) -> Any:
        """The solver with the solution of the linear relaxation; None when there is none, or it was not solved in time."""
        self.build()
        highs = self.program.solver(limit_s, relaxed=True)
        import highspy

        highs.run()
        return highs if highs.getModelStatus() == highspy.HighsModelStatus.kOptimal else None

    def start(self, values: Sequence[float], threshold: float = 0.5) -> Start:
        """Runs and swaps with which there is on the device after each moment what the solution says, where it says more than `threshold`;
        what is missing is made on demand."""
        graph = self.graph
        here = [False] * graph.tensor_count
        number = {op: index + 1 for index, op in enumerate(self.moments)}
        last_touch = graph.producer.tolist()
        runs: list[int] = []
        swaps: set[Swap] = set()
        for op in range(graph.op_count):
            runs.extend(missing(graph, graph.reads[op], here, self.maker))
            runs.append(op)
            for tensor in graph.writes[op]:
                here[tensor] = True
            for tensor in graph.reads[op]:
                last_touch[tensor] = op
            for tensor in self.tensors if op in number else ():
                if not here[tensor] or self._stays(number[op], tensor, values, threshold):
                    continue
                if self._is_out(number[op], tensor, values):
                    swaps.add((tensor, last_touch[tensor], True))
                else:
                    here[tensor] = not graph.replayable[self.maker[tensor]]
        kept = tuple(np.flatnonzero(graph.kept & ~graph.resident).tolist())
        return runs + missing(graph, kept, here, self.maker), frozenset(swaps)

    def _stays(self, index: int, tensor: int, values: Sequence[float], threshold: float) -> bool:
        variable = self.program.stored.get((index, tensor))
        return variable is not None and values[variable] > threshold

    def _is_out(self, index: int, tensor: int, values: Sequence[float]) -> bool:
        """Whether the tensor is on the host at this moment."""
        return False
