"""The curve between peak and step time, and the lowest peak that a given overhead buys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memopt.advisors.advise import Adviser, Decided
from memopt.errors import BudgetInfeasible
from memopt.plan import AS_LITTLE, Plan

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2)
"""Of the unplanned peak: tenths, and twice as close below a half, where what a plan costs bends."""
_PROBES = 7
"""Halvings, each a whole plan: the lowest peak is found to a 128th of the unplanned one."""


@dataclass(frozen=True, slots=True)
class Point:
    """One budget and the plan for it; no plan where none was found, with the smallest peak instead."""

    budget_bytes: int
    plan: Plan | None
    min_peak_bytes: int

    @property
    def overhead(self) -> float:
        return (
            self.plan.predicted_step_ms / self.plan.plain_step_ms - 1
            if self.plan and self.plan.plain_step_ms
            else 0.0
        )


def frontier(adviser: Adviser, strategy: str = "auto") -> Iterator[Point]:
    """Points from 90 % of the unplanned peak down; ends after the first budget that cannot be met, and where Ctrl-C ended a search."""
    unplanned = adviser.unplanned_peak_bytes
    for share in SHARES:
        try:
            point = probe(adviser, int(share * unplanned), strategy)
        except KeyboardInterrupt:
            if share == SHARES[0]:
                raise
            return
        yield point
        if adviser.interrupted:
            return
        if point.plan is None:
            if point.min_peak_bytes < unplanned:
                yield probe(adviser, int(point.min_peak_bytes * (1 + AS_LITTLE)) + 1, strategy)
            return


def without_dominated(points: Iterable[Point]) -> list[Point]:
    """From the largest budget down, each with the fastest plan found that fits in it: one for a smaller budget fits too."""
    kept: list[Point] = []
    best: Plan | None = None
    for point in sorted(points, key=lambda each: each.budget_bytes):
        own = point.plan
        if own is None or best is None or own.predicted_step_ms < best.predicted_step_ms:
            kept.append(point)
            best = own or best
        else:
            kept.append(Point(point.budget_bytes, best, best.predicted_peak_bytes))
    return kept[::-1]


def probe(adviser: Adviser, budget_bytes: int, strategy: str = "auto") -> Point:
    try:
        plan = adviser.plan(budget_bytes, strategy)
    except BudgetInfeasible as error:
        return Point(budget_bytes, None, error.min_peak_bytes)
    return Point(budget_bytes, plan, plan.predicted_peak_bytes)


def lowest_peak(adviser: Adviser, most_overhead: float, strategy: str = "auto") -> Decided:
    """What is decided for the lowest peak found whose step takes at most `1 + most_overhead` times the plain one: bisection on the budget."""
    high = unplanned = adviser.unplanned_peak_bytes
    best = adviser.decide(high, strategy)
    low = 0
    for _ in range(_PROBES):
        middle = (low + high) // 2
        try:
            found = adviser.decide(middle, strategy)
        except BudgetInfeasible as error:
            low = max(middle, error.min_peak_bytes)
        except KeyboardInterrupt:
            if not _changes_something(best):
                raise
            break
        else:
            problem, decisions, _ = found
            timeline, plain_ms = problem.run(decisions), problem.plain_step_ms
            if timeline.step_ms <= (1 + most_overhead) * plain_ms or not plain_ms:
                best, high = found, timeline.peak_bytes
            else:
                low = middle
        if high - low < 0.004 * unplanned or adviser.interrupted:
            break
    if _changes_something(best):
        return best
    problem, decisions, notes = best
    note = f"no plan was found that lowers the peak for at most {100 * most_overhead:.3g} % of the step"
    return problem, decisions, (note, *(each for each in notes if not each.startswith("nothing to do")))


def _changes_something(decided: Decided) -> bool:
    problem, decisions, _ = decided
    return bool(decisions) or problem.is_of_another_run
