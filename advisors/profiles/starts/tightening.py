"""What the integer program of `lower_bound` chooses, asked again and again as the simulator finds fault with its answers.

What the program cannot know (a chain that runs twice, room for replays) comes back from the simulator: an answer that costs more than
promised is cut off, and where one does not fit, more is asked for at the ops where it did not. Exact, over all choices (once each), when
it ends by itself on `_FEW` tensors at most; for more the time limit, or `_ROUNDS` programs, end it. Needs HiGHS.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.profiles.lower_bound import Relief, watching_ms
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.estimators.simulator.trace_view import Ints

_FEW = 12
_MOST_WHOLE = 800
"""Choices above which the relaxation is rounded."""
_THRESHOLDS = (0.5, 0.3, 0.1, 0.7, 0.9)
_ROUNDS = 40


def answers(problem: Problem, kinds: frozenset[str]) -> Iterator[Decisions]:
    """What the program chooses among options of these kinds, again and again as the simulator finds fault with it."""
    until = now() + problem.seconds_left
    if problem.fits(problem.plain):
        yield {}
        return
    few = len(problem.candidates) <= _FEW
    yield from _all(problem, kinds, until) if few else _tightened(problem, kinds, until)


def _all(problem: Problem, kinds: frozenset[str], until: float) -> Iterator[Decisions]:
    """One answer after the other, the cheapest first as far as the program knows, until no other can be cheaper."""
    relief = Relief(problem, kinds).build()
    best_ms = float("inf")
    plain_ms = problem.view.trace.step_ms + watching_ms(problem)
    while now() < until:
        solved = relief.program.solve(until - now())
        if solved.values is None or plain_ms + solved.bound >= best_ms - 1e-9:
            return
        chosen = relief.decisions(solved)
        decisions = place_prefetches(problem, chosen)
        yield decisions
        timeline = problem.run(decisions)
        if problem.fits(timeline):
            best_ms = min(best_ms, timeline.step_ms)
        relief.forbid(chosen)


def _tightened(problem: Problem, kinds: frozenset[str], until: float) -> Iterator[Decisions]:
    """Answers to ever stricter programs: where one does not fit, the next must let more go, or make less again at once."""
    more = np.zeros(problem.view.n, dtype=np.int64)
    apart: set[frozenset[int]] = set()
    for turn in range(_ROUNDS):
        relief = Relief(problem, kinds, more, tuple(apart), alone=turn > 0).build()
        rounded = len(relief.choice) > _MOST_WHOLE
        left = until - now()
        solved = relief.program.solve(left / 2, relaxed=rounded) if left > 0 else None
        if solved is None or solved.values is None:
            return
        known = more.sum(), len(apart)
        for threshold in _THRESHOLDS if rounded else (0.5,):
            decisions = place_prefetches(problem, relief.decisions(solved, threshold))
            yield decisions
            if turn and problem.fits(problem.run(decisions)) and not rounded:
                return
            together = made_together(problem, decisions)
            apart |= together
            if not together:
                more = np.maximum(more, unforeseen_bytes(problem, decisions))
        if turn and known == (more.sum(), len(apart)):
            return


def made_together(problem: Problem, decisions: Decisions) -> set[frozenset[int]]:
    """For each op above the target: the storages, two at least, that one replay before it makes on its way to the one asked for."""
    view = problem.view
    over = problem.run(decisions).high_bytes > problem.target_bytes
    found = set()
    for target, chain in problem.simulator.chains(decisions)[0].items():
        if over[view.asked_as(target, early=decisions[target].early).first_use]:
            made = {view.value_storage[value] for op in chain.ops for value in view.writes[op]}
            on_the_way = frozenset(s for s in made if s in decisions and s != target)
            if len(on_the_way) > 1:
                found.add(on_the_way)
    return found


def unforeseen_bytes(problem: Problem, decisions: Decisions) -> Ints:
    """Per op above the target: what is there that the program did not know of (replays, records, copies under way)."""
    high = problem.run(decisions).high_bytes
    foreseen = problem.plain.high_bytes.copy()
    for storage, decision in decisions.items():
        candidate = problem.candidates[storage]
        foreseen[candidate.away] -= candidate.saved.size_bytes - decision.encoded_bytes
    return np.where(high > problem.target_bytes, np.maximum(high - foreseen, 0), 0)
