"""AutoTM (Hildebrand et al., ASPLOS 2020): an integer program over where each tensor lies when.

Rule: each tensor flows through the two memories over time, with moves between them that overlap with kernels (async) or do not
(sync); at every kernel the fast memory suffices; minimise the sum over kernels of the longer of the kernel and the moves that
overlap with it, plus the sync moves. Differs: kernels never read from the slow memory. Needs HiGHS.
On profiles a tensor leaves once and comes back once, between forward and backward; kernels are gathered in `_SPANS` spans of the
step, moves are shares of spans, out and back have a lane each, and a move that does not fit under its span is a sync one; one binary a
tensor, the `_MOST_TENSORS` largest. O(tensors x spans) columns, in at most `_ROUNDS` programs. The simulator judges the answer; where
it does not fit, the program must let more go.
On graphs each tensor has one choice: its longest idle time is spent away or not, one binary each, the `_MOST_TRIPS` largest; moves overlap with
the kernels before the need, and after leaving; one program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from memopt.advisors.clock import now
from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.executors.swap_executor import (
    Copies,
    Trip,
    Walk,
    as_soon_as_possible,
    just_in_time,
)
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.profiles.starts.tightening import unforeseen_bytes
from memopt.advisors.program import Program
from memopt.advisors.registry import A_LINK, SWAPS, strategy
from memopt.estimators.simulator.trace_view import Floats, Ints

_SPANS = 32
_MOST_TENSORS = 300
_ROUNDS = 6
_TIE = 1e-4
"""Price of a move that costs nothing, by its time: of equal plans the one that moves less."""


_MOST_TRIPS = 400
_MOST_ROWS = 300
"""Moments above the budget that the program sees, evenly taken of all: the smaller program is solved within the limit."""
_EACH = 20
"""Of the moments up to which the moves on a lane are added up, one in so many is a row; a stall between two is priced at the next."""

autotm = strategy(
    "autotm",
    paper="Hildebrand et al. 2020, AutoTM: Automatic Tensor Movement in Heterogeneous Memory Systems using Integer Linear Programming",
    needs=f"{A_LINK}; HiGHS (memopt[exact])",
    allows=SWAPS,
)


@autotm.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """The program's answers; at last everything away."""
    everything = place_prefetches(problem, {c.storage: swap_of(c) for c in swappable(problem)})
    yield from autotm_plans(problem)
    yield everything


def autotm_plans(problem: Problem) -> Iterator[Decisions]:
    """The program's answers, with the moments at which it wants tensors back and with those that hide every copy."""
    until = now() + problem.seconds_left
    able = sorted(swappable(problem), key=lambda c: -c.saved.size_bytes)[:_MOST_TENSORS]
    if problem.fits(problem.plain) or not able:
        yield {}
        return
    more = np.zeros(problem.view.n, dtype=np.int64)
    for _ in range(_ROUNDS):
        left = until - now()
        answer = Placement(problem, able, more).solve(left / 2) if left > 0 else None
        if answer is None:
            return
        yield answer
        hidden = place_prefetches(problem, answer)
        yield hidden
        if problem.fits(problem.run(hidden)):
            return
        stricter = np.maximum(more, unforeseen_bytes(problem, hidden))
        if (stricter == more).all():
            return
        more = stricter


@dataclass(slots=True)
class Placement:
    """The program: which tensors go, and in which spans of the step the moves lie."""

    problem: Problem
    able: list[Candidate]
    more_bytes: Ints
    program: Program = field(default_factory=Program)
    span_of: Ints = field(init=False)
    span_ms: Floats = field(init=False)
    gone: list[int] = field(default_factory=list)
    """Per tensor its binary column."""
    out: list[dict[int, int]] = field(default_factory=list)
    """Per tensor: span -> column with the share of the move that lies in it."""
    back: list[dict[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        starts = self.problem.view.start_ms
        step_ms = max(float(starts[-1] + self.problem.view.op_ms[-1]), 1e-9)
        self.span_of = np.minimum((starts / step_ms * _SPANS).astype(np.int64), _SPANS - 1)
        self.span_ms = np.full(_SPANS, step_ms / _SPANS)
        for candidate in self.able:
            self._tensor(candidate)
        self._capacity()
        self._kernels()

    def solve(self, seconds: float) -> Decisions | None:
        """What goes, and when it is wanted back; None when nothing was found."""
        values = self.program.solve(seconds).values
        if values is None:
            return None
        found: Decisions = {}
        for candidate, column, back in zip(self.able, self.gone, self.back, strict=True):
            if values[column] > 0.5:
                span = min(s for s, share in back.items() if values[share] > 1e-6)
                found[candidate.storage] = replace(
                    swap_of(candidate), prefetch_op=self._trigger(candidate, span)
                )
        return found

    def _trigger(self, candidate: Candidate, span: int) -> int:
        """The first unpack in the span from which the tensor may come back; -1 when there is none."""
        saved, triggers = candidate.saved, self.problem.triggers
        first = max(saved.gone_after + 1, int(np.searchsorted(self.span_of, span)))
        inside = triggers[(triggers >= first) & (triggers < saved.first_use)]
        return int(inside[0]) if inside.size else -1

    def _tensor(self, candidate: Candidate) -> None:
        """All of it goes, or nothing; no part comes back before it went."""
        program, saved = self.program, candidate.saved
        n = self.problem.view.n
        first = int(self.span_of[min(saved.packed_op + 1, n - 1)])
        last = int(self.span_of[saved.first_use])
        staging_ms = self.problem.simulator.staging_ms(saved)
        column = program.column(staging_ms + _TIE * self._ms(candidate, out=True), whole=True)
        out = {span: program.column() for span in range(first, last + 1)}
        back = {span: program.column() for span in range(first, last + 1)}
        for shares in (out, back):
            program.row({column: -1.0, **dict.fromkeys(shares.values(), 1.0)}, low=0.0, high=0.0)
        for span in range(first, last):
            terms = {out[s]: 1.0 for s in range(first, span + 1)}
            program.row(terms | {back[s]: -1.0 for s in range(first, span + 1)}, low=0.0)
        self.gone.append(column)
        self.out.append(out)
        self.back.append(back)

    def _ms(self, candidate: Candidate, *, out: bool) -> float:
        return self.problem.simulator.copy_ms(candidate.saved.size_bytes, swap_of(candidate), out=out)

    def _capacity(self) -> None:
        """In each span, at the op that is furthest above the target: what went up to it and has not come back before."""
        excess = self.problem.plain.high_bytes - self.problem.target_bytes + self.more_bytes
        for span in range(_SPANS):
            ops = np.flatnonzero((self.span_of == span) & (excess > 0))
            for op in {int(ops[np.argmax(excess[ops])]), int(ops[0]), int(ops[-1])} if len(ops) else ():
                terms: dict[int, float] = {}
                for candidate, out, back in zip(self.able, self.out, self.back, strict=True):
                    if candidate.away.start <= op < candidate.away.stop:
                        share = candidate.saved.size_bytes / float(excess[op])
                        terms |= {out[s]: share for s in out if s <= span}
                        terms |= {back[s]: -share for s in back if s < span}
                self.program.row(terms, low=1.0)

    def _kernels(self) -> None:
        """A span takes as long as the moves on either lane when they take longer than its kernels."""
        for lane, is_out in ((self.out, True), (self.back, False)):
            times = [self._ms(candidate, out=is_out) for candidate in self.able]
            for span in range(_SPANS):
                terms = {shares[span]: ms for shares, ms in zip(lane, times, strict=True) if span in shares}
                if terms:
                    wait = self.program.column(1.0, most=math.inf)
                    self.program.row({**terms, wait: -1.0}, high=float(self.span_ms[span]))


@autotm.graph_trips
def on_graph(board: GraphBoard) -> Iterator[Copies]:
    """AutoTM (ASPLOS'20): integer program over what is away when, moves overlapped with kernels (needs highspy)."""
    size = board.walk.size
    largest = sorted(board.trips, key=lambda trip: -size[trip.tensor])[:_MOST_TRIPS]
    trips = [trip for trip in largest if size[trip.tensor] > max(size, default=1) // 100_000]
    chosen = chosen_trips(board.problem, board.walk, trips)
    if chosen is None:
        raise board.problem.not_below(int(board.load_without(trips).max()))
    for back in (just_in_time, as_soon_as_possible):
        yield chosen, back


def chosen_trips(problem: GraphProblem, walk: Walk, trips: list[Trip]) -> list[Trip] | None:
    """The trips that the program picks; None when it is infeasible."""
    program = Program()
    away = [program.column(_TIE * walk.out_ms(trip.tensor), whole=True) for trip in trips]
    over = np.flatnonzero(walk.memory > problem.budget_bytes)
    scale = float(max(1, int(walk.memory.max())))
    for position in over[np.unique(np.linspace(0, len(over) - 1, _MOST_ROWS).astype(np.int64))].tolist():
        terms = {
            x: walk.size[t.tensor] / scale
            for x, t in zip(away, trips, strict=True)
            if t.leave < position < t.need
        }
        if not terms:
            return None
        program.row(terms, low=(int(walk.memory[position]) - problem.budget_bytes) / scale)
    _stalls(program, walk, dict(zip(away, trips, strict=True)))
    values = program.solve(max(0.5, problem.until - now())).values
    if values is None:
        return None
    return [trip for trip, column in zip(trips, away, strict=True) if values[column] > 0.5]


def _stalls(program: Program, walk: Walk, trips: dict[int, Trip]) -> None:
    """Columns for the time by which the moves of any prefix (out) or suffix (back) exceed the kernels that they overlap with."""
    end = float(walk.clock[-1])
    out_stall, in_stall = (program.column(1.0, most=math.inf) for _ in range(2))
    for at in sorted({trip.need for trip in trips.values()})[::_EACH]:
        moved = {x: walk.out_ms(t.tensor) for x, t in trips.items() if t.need <= at}
        program.row({**moved, out_stall: -1.0}, high=float(walk.clock[at]))
    for at in sorted({trip.leave for trip in trips.values()})[::_EACH]:
        moved = {x: walk.in_ms(t.tensor) for x, t in trips.items() if t.leave >= at}
        program.row({**moved, in_stall: -1.0}, high=end - float(walk.clock[at]))
