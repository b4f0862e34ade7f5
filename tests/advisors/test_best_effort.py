"""The plan where none meets the budget: the smallest peak, but not at any cost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from memopt.advisors.advise import Adviser
from memopt.advisors.best_effort import best_effort, within_reason
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.errors import BudgetInfeasible
from memopt.plan import NOT_MET, Plan
from memopt.units import format_bytes
from tests.support.layers_trace import Layer, build

MIB = 1 << 20
LEAST, MOST, PLAIN_MS = 40 * MIB, 100 * MIB, 10.0


@pytest.fixture(scope="module")
def some_plan() -> Plan:
    trace = build([Layer(MIB, 2.0, (i - 1,)) for i in range(8)])
    return Adviser(trace, DEFAULT_ALLOW, 0.2).plan(trace.peak_bytes)


def missed(plan: Plan, step_ms: float, *, budget: int = 30 * MIB) -> Plan:
    """The plan of the smallest peak, above its `budget`."""
    note = f"{NOT_MET}the smallest peak found is {format_bytes(LEAST)}; held by something"
    return msgspec.structs.replace(
        plan,
        budget_bytes=budget,
        predicted_peak_bytes=LEAST,
        plain_step_ms=PLAIN_MS,
        predicted_step_ms=step_ms,
        notes=[note],
    )


def adviser(plan: Plan, step_ms: Callable[[float], float]) -> Any:
    """Whose plans take `step_ms` by what part of what the smallest peak takes off they leave."""

    def planned(wanted_bytes: int) -> Plan:
        left = (wanted_bytes - LEAST) / (MOST - LEAST)
        if left < 0.3:
            raise BudgetInfeasible(wanted_bytes, LEAST)
        return msgspec.structs.replace(
            plan, predicted_peak_bytes=wanted_bytes, plain_step_ms=PLAIN_MS, predicted_step_ms=step_ms(left)
        )

    return SimpleNamespace(plan=planned, unplanned_peak_bytes=MOST, recorded=None)


def test_of_plans_that_miss_the_budget_one_is_taken_whose_step_is_not_many_plain_ones(
    some_plan: Plan,
) -> None:
    slow = missed(some_plan, 50 * PLAIN_MS)
    found = within_reason(adviser(some_plan, lambda left: PLAIN_MS * (11 - 12 * left)), slow)
    assert found.predicted_peak_bytes == LEAST + 3 * (MOST - LEAST) // 4
    assert found.predicted_step_ms <= 3 * PLAIN_MS
    assert found.budget_bytes == slow.budget_bytes
    (note,) = found.notes
    assert note == f"{NOT_MET}the smallest peak found is 40.0 MiB (the step takes 50 plain ones then, and 2 under this plan); held by something"  # fmt: skip


def test_the_smallest_peak_is_taken_where_it_costs_little_or_nearly_meets_the_budget(some_plan: Plan) -> None:
    def none(left: float) -> float:
        raise AssertionError("nobody asks for another plan")

    for plan in (missed(some_plan, 2.9 * PLAIN_MS), missed(some_plan, 50 * PLAIN_MS, budget=int(0.99 * LEAST))):  # fmt: skip
        assert within_reason(adviser(some_plan, none), plan) is plan


def test_the_smallest_peak_is_taken_where_every_other_costs_as_much(some_plan: Plan) -> None:
    slow = missed(some_plan, 50 * PLAIN_MS)
    assert within_reason(adviser(some_plan, lambda left: 60 * PLAIN_MS), slow) is slow


@pytest.mark.parametrize(("grown", "share"), [(1.0, 1.0), (1.01, 0.99)])
def test_where_iterations_vary_a_plan_leaves_some_more_below_the_budget(grown: float, share: float) -> None:
    """Rows that went to another expert came to 55 KiB more than the budget."""
    trace = build([Layer(MIB, 2.0, (i - 1,)) for i in range(8)])
    recorded = Adviser(trace, DEFAULT_ALLOW, 0.2)
    adviser = Adviser(trace, DEFAULT_ALLOW, 0.2, recorded=recorded, grown=grown)
    budget = trace.peak_bytes - MIB
    asked: list[int] = []
    whole = Adviser.plan

    class Asked(Adviser):
        def plan(self, budget_bytes: int, strategy: str = "auto") -> Plan:
            asked.append(budget_bytes)
            return whole(adviser, budget_bytes, strategy)

    plan = best_effort(Asked(trace, DEFAULT_ALLOW, 0.2, recorded=recorded, grown=grown), f"{budget}B")
    assert asked == [int(share * budget)]
    assert plan.budget_bytes == budget
    assert plan.predicted_peak_bytes <= share * budget
    assert plan.over_bytes == 0
