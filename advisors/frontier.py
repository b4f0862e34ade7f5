"""The curve between peak and step time, and the lowest peak that a given overhead buys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from memopt.advisors.advise import Adviser
from memopt.errors import BudgetInfeasible
from memopt.plan import Plan

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2)
_PROBES = 7


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
    """Points from 90 % of the unplanned peak down; ends after the first budget that cannot be met."""
    unplanned = adviser.unplanned_peak_bytes
    for share in SHARES:
        point = probe(adviser, int(share * unplanned), strategy)
        yield point
        if point.plan is None:
            if point.min_peak_bytes < unplanned:
                yield probe(adviser, int(point.min_peak_bytes * 1.006) + 1, strategy)
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


def lowest_peak(adviser: Adviser, most_overhead: float, strategy: str = "auto") -> Plan:
    """The plan with the lowest peak found whose step takes at most `1 + most_overhead` times the plain one: bisection on the budget."""
    high = adviser.unplanned_peak_bytes
    best = adviser.plan(high, strategy)
    low = 0
    for _ in range(_PROBES):
        point = probe(adviser, (low + high) // 2, strategy)
        if point.plan is not None and point.overhead <= most_overhead:
            best, high = point.plan, point.plan.predicted_peak_bytes
        else:
            low = max((low + high) // 2, point.min_peak_bytes if point.plan is None else 0)
        if high - low < 0.004 * adviser.unplanned_peak_bytes:
            break
    if best.actions:
        return best
    note = f"no plan was found that lowers the peak for at most {100 * most_overhead:.3g} % of the step"
    others = [each for each in best.notes if not each.startswith("nothing to do")]
    return msgspec.structs.replace(best, notes=[note, *others])
