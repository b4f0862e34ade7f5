"""The curve of peak against step time: each budget has the fastest plan that fits in it."""

from __future__ import annotations

import msgspec
import pytest

from memopt.advisors.frontier import Point, without_dominated
from tests.cli.test_show import toy_plan


def point(budget: int, peak: int, step_ms: float | None) -> Point:
    if step_ms is None:
        return Point(budget, None, peak)
    plan = msgspec.structs.replace(toy_plan(), predicted_peak_bytes=peak, predicted_step_ms=step_ms)
    return Point(budget, plan, peak)


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([(90, 88, 11.0), (80, 78, 12.0)], [(90, 88, 11.0), (80, 78, 12.0)]),
        ([(90, 88, 13.0), (80, 78, 12.0)], [(90, 78, 12.0), (80, 78, 12.0)]),
        ([(90, 88, 11.5), (80, 78, 13.0), (70, 66, 12.0)], [(90, 88, 11.5), (80, 66, 12.0), (70, 66, 12.0)]),
        # The budget that could not be met stands before the one that was tried after it.
        ([(90, 88, 13.0), (70, 74, None), (75, 74, 12.0)], [(90, 74, 12.0), (75, 74, 12.0), (70, 74, None)]),
    ],
)
def test_a_plan_that_another_is_better_than_is_not_on_the_curve(points, kept) -> None:
    found = without_dominated([point(*each) for each in points])
    assert [
        (p.budget_bytes, p.min_peak_bytes, p.plan.predicted_step_ms if p.plan else None) for p in found
    ] == kept
