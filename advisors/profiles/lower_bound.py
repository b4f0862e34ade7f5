"""The least that decisions must cost: a linear program that no plan can undercut, and the choices that it would make.

At each moment above the target, what goes must amount to the excess. A tensor that goes by recomputation makes its producer run
again, and whatever that needs and is gone for good by then (each op counted once, however often it runs); a codec costs its
encoding and decoding; swaps that are to be away at a moment must have passed the link before it, and must pass back after it,
one after the other, in the time of the step and what the plan adds to it. Left out, hence a bound and not a prediction: where
replays need room, what records pin, chains that run twice, the order on the links. Rows: moments x candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.program import Program, Solved
from memopt.errors import NotPossibleHere
from memopt.estimators.simulator.chains import find_chain, is_intact
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.trace_view import Ints

_MOST_MOMENTS = 90
"""Each is a row of the program: this bounds its size."""
_MOST_CELLS = 9000
"""Moments times candidates, which is the program's size."""
_MOST_CANDIDATES = 3000
"""With more, the six moments that are left would tell too little."""
_SLACK = 1e-5
"""Share by which the solver's own tolerance may have lifted its optimum."""


class _Choice:
    """An option of a storage, its column, and the ops outside which it relieves nothing."""

    __slots__ = ("candidate", "column", "first", "option", "stop")

    def __init__(self, candidate: Candidate, option: Decision, column: int) -> None:
        self.candidate, self.option, self.column = candidate, option, column
        self.first, self.stop = candidate.saved.gone_after + 1, candidate.saved.release + 1
        if option.kind in ("recompute", "swap"):
            spans = candidate.away_by(option)
            self.first, self.stop = min(s.start for s in spans), max(s.stop for s in spans)


@dataclass(slots=True)
class Relief:
    """The program for one problem. `choice` has a column for each option of each candidate."""

    problem: Problem
    kinds: frozenset[str] = frozenset({"recompute", "swap", "compress", "drop"})
    tighten_bytes: Ints | None = None
    """Per op: so much more than the excess must go (then it bounds nothing any more)."""
    apart: tuple[frozenset[int], ...] = ()
    """Sets of storages of which one at least must not be made again (a bound no more, either)."""
    alone: bool = False
    """Count the replay that a tensor needs when it alone is away, not what it needs in any case (likely, but no bound)."""
    program: Program = field(default_factory=Program)
    choice: dict[tuple[int, int], int] = field(default_factory=dict)
    """(storage, number of the option) -> column."""
    rerun: dict[int, int] = field(default_factory=dict)
    """Op -> column: does it run again?"""
    stall: int = -1
    _choices: list[_Choice] = field(default_factory=list)

    def build(self) -> Relief:
        problem = self.problem
        self.stall = self.program.column(1.0, most=math.inf)
        for candidate in problem.candidates.values():
            self._options(candidate)
        excess = problem.plain.high_bytes - problem.target_bytes
        if self.tighten_bytes is not None:
            excess = excess + self.tighten_bytes
        for moment in self._moments(excess).tolist():
            self._cover(moment, int(excess[moment]))
        for storages in self.apart:
            self.program.row(self._recomputed(storages), high=len(storages) - 1.0)
        return self

    def decisions(self, solved: Solved, threshold: float = 0.5) -> Decisions:
        """The options whose columns are above `threshold`, the largest of each storage."""
        assert solved.values is not None
        found: dict[int, tuple[float, Decision]] = {}
        for (storage, number), column in self.choice.items():
            share = float(solved.values[column])
            if share > threshold and share > found.get(storage, (0.0, None))[0]:
                found[storage] = share, self.problem.candidates[storage].options[number]
        return {storage: decision for storage, (_, decision) in found.items()}

    def forbid(self, decisions: Mapping[int, Decision]) -> None:
        """Let no later solution make exactly these choices."""
        terms, taken = {}, 0
        for (storage, number), column in self.choice.items():
            decision = decisions.get(storage)
            option = self.problem.candidates[storage].options[number]
            chosen = decision is not None and (decision.kind, decision.tier) == (option.kind, option.tier)
            terms[column] = -1.0 if chosen else 1.0
            taken += chosen
        self.program.row(terms, low=1.0 - taken)

    def _recomputed(self, storages: frozenset[int]) -> dict[int, float]:
        candidates = self.problem.candidates
        return {
            column: 1.0
            for (storage, number), column in self.choice.items()
            if storage in storages and candidates[storage].options[number].kind == "recompute"
        }

    def _options(self, candidate: Candidate) -> None:
        columns = {}
        for number, option in enumerate(candidate.options):
            if option.kind not in self.kinds or option.early:
                continue  # made early, it is away for less long and costs as much at the least
            cost = 0.0
            if option.kind == "swap":
                cost = self.problem.simulator.staging_ms(candidate.saved)
            elif option.kind != "recompute":
                cost = self.problem.solo_ms(candidate, option)
            column = self.program.column(cost, whole=True)
            columns[column] = 1.0
            self.choice[candidate.storage, number] = column
            self._choices.append(_Choice(candidate, option, column))
            if option.kind == "recompute":
                self._reruns(candidate, column)
        if len(columns) > 1:
            self.program.row(columns, high=1.0)

    def _reruns(self, candidate: Candidate, column: int) -> None:
        alone = candidate.chain.ops if self.alone and candidate.chain is not None else None
        for op in alone or always_rerun(self.problem, candidate):
            if op not in self.rerun:
                self.rerun[op] = self.program.column(self.problem.view.replay_ms[op])
            self.program.row({self.rerun[op]: 1.0, column: -1.0}, low=0.0)

    def _moments(self, excess: Ints) -> Ints:
        """Ops above the target: the highest, and some spread over all of them."""
        over = np.flatnonzero(excess > 0)
        most = max(6, min(_MOST_MOMENTS, _MOST_CELLS // max(1, len(self.problem.candidates))))
        if len(over) <= most:
            return over
        highest = over[np.argsort(-excess[over], kind="stable")[: most // 2]]
        spread = over[np.linspace(0, len(over) - 1, most // 2).astype(np.int64)]
        named = np.flatnonzero(self.tighten_bytes) if self.tighten_bytes is not None else over[:0]
        return np.unique(np.concatenate([highest, spread, np.intersect1d(named, over)]))

    def _cover(self, moment: int, excess: int) -> None:
        """What goes at `moment` is at least the excess; what is swapped then has passed the link, and will again."""
        terms: dict[int, float] = {}
        out: dict[int, float] = {}
        back: dict[int, float] = {}
        problem = self.problem
        first, last = problem.view.n, 0
        for choice in self._choices:
            if not choice.first <= moment < choice.stop:
                continue
            candidate, option, column = choice.candidate, choice.option, choice.column
            relief = problem.relief_bytes(candidate, option, moment)
            if relief == 0:
                continue
            span = next((s for s in candidate.absences if s.start <= moment < s.stop), None)
            if option.kind == "swap" and span is not None:
                away = self.program.column()
                self.program.row({column: 1.0, away: -1.0}, low=0.0)
                column = away
                out[away] = problem.simulator.copy_ms(candidate.saved.size_bytes, option, out=True)
                back[away] = problem.simulator.copy_ms(candidate.saved.size_bytes, option, out=False)
                begin = candidate.saved.packed_op + 1 if span == candidate.away else span.start
                first, last = min(first, begin), max(last, span.stop)
            terms[column] = relief / max(1, excess)
        self.program.row(terms, low=1.0)
        if out:
            starts = problem.view.start_ms
            self._link(out, float(starts[moment] - starts[first]))
            self._link(back, float(starts[last] - starts[moment]))

    def _link(self, copies: dict[int, float], window_ms: float) -> None:
        """Copies, one after the other, take at most the window and all that the plan adds to the step."""
        added = {column: -cost for column, cost in enumerate(self.program.cost) if cost}
        scale = 1.0 / max(1e-9, max(copies.values()))
        terms = {column: factor * scale for column, factor in (added | copies).items()}
        self.program.row(terms, high=max(0.0, window_ms) * scale)


def always_rerun(problem: Problem, candidate: Candidate) -> set[int]:
    """Ops that run again whenever and beside whatever else `candidate` is made again: what is gone for good once it is away."""
    view, at, own = problem.view, candidate.saved.gone_after + 1, candidate.storage
    chain = find_chain(
        view,
        [candidate.saved.value],
        lambda value: view.value_storage[value] != own and is_intact(view, value, at),
        lambda op: view.replayable[op],
    )
    return set(chain.ops) if chain is not None else set()


def least_step_ms(problem: Problem, seconds: float) -> float | None:
    """No plan that fits has a shorter step, by the simulator; infinite when none fits, None when it is not known: too
    large a problem, or no HiGHS."""
    trace = problem.view.trace
    if problem.fits(problem.plain):
        return trace.step_ms
    if len(problem.candidates) > _MOST_CANDIDATES:
        return None
    try:
        relaxed = any(option.kind == "swap" for c in problem.candidates.values() for option in c.options)
        bound = Relief(problem).build().program.solve(seconds, relaxed=relaxed).bound
    except NotPossibleHere:
        return None
    if math.isinf(bound):
        return bound
    # A plan that fits has an action, since the plain run does not.
    return trace.step_ms + watching_ms(problem) + max(0.0, bound) * (1 - _SLACK)


def watching_ms(problem: Problem) -> float:
    """What any action at all adds to a step, besides its own cost."""
    return problem.simulator.watching_ms if problem.candidates else 0.0
