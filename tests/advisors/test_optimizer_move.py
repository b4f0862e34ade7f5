"""Ctrl-C while it is decided whether the optimizer steps inside backward: one search ends, and no other begins."""

from __future__ import annotations

import pytest

from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.optimizer_move import plan_jointly
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.decision import RECOMPUTE
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import build, chain


class Stub(Auto):
    """Gives one plan, which costs time and does not fit."""

    def __init__(self, *, interrupted: bool) -> None:
        super().__init__(1.0)
        self.ends_by_ctrl_c = interrupted
        self.searched: list[Problem] = []

    def within(self, problem: Problem, seconds: float) -> Decisions:
        self.searched.append(problem)
        self.interrupted = self.ends_by_ctrl_c
        return {2: RECOMPUTE}


@pytest.mark.parametrize(("interrupted", "searches"), [(True, 1), (False, 2)])
def test_an_interrupted_search_is_the_last(interrupted: bool, searches: int) -> None:
    view = TraceView(build(chain([400] * 6)))
    plain = Problem(view, Simulator(view), 2500)
    moved = Problem(view, Simulator(view), 2500, instead_of=plain)
    auto = Stub(interrupted=interrupted)
    assert plan_jointly(auto, moved)[1] == {2: RECOMPUTE}
    assert [problem is moved for problem in auto.searched] == [True, False][:searches]


class Refusing(Stub):
    def within(self, problem: Problem, seconds: float) -> Decisions:
        self.searched.append(problem)
        raise BudgetInfeasible(problem.budget_bytes, problem.floor_bytes)


@pytest.mark.parametrize(("budget_bytes", "searches"), [(2500, 2), (100, 1)], ids=["possible", "impossible"])
def test_the_run_as_it_is_is_searched_where_a_plan_for_it_can_be(budget_bytes: int, searches: int) -> None:
    view = TraceView(build(chain([400] * 6)))
    plain = Problem(view, Simulator(view), budget_bytes)
    moved = Problem(view, Simulator(view), budget_bytes, instead_of=plain)
    assert (plain.floor_bytes > plain.target_bytes) == (searches == 1)
    auto = Refusing(interrupted=False)
    with pytest.raises(BudgetInfeasible):
        plan_jointly(auto, moved)
    assert len(auto.searched) == searches
