"""A search for which a script waits: it takes no longer than it is worth, and what it needs is imported before anybody waits."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memopt.advisors.clock import SearchClock
from memopt.advisors.profiles import auto as planner
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.optimizer_move import plan_jointly, plan_with_pieces
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.decision import RECOMPUTE
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.version import IMPORT_ROOT
from tests.support.layers_trace import Layer, build, chain

MIB = 1 << 20
STEPS = 4


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Those that searches have had, by a clock that goes on by a millisecond whenever it is looked at."""
    looks = itertools.count()
    monkeypatch.setattr(SearchClock, "__call__", lambda self: 0.001 * next(looks))
    return lambda: 0.001 * next(looks)


def layers(milliseconds: float) -> Problem:
    view = TraceView(
        build([Layer((1 + i % 5) * MIB, (1 + i % 3) * milliseconds, (i - 1,)) for i in range(60)])
    )
    return Problem(view, Simulator(view), int(0.6 * view.trace.peak_bytes))


def test_the_search_ends_when_it_has_taken_as_long_as_the_plan_costs(seconds: Callable[[], float]) -> None:
    """Another is looked for while the script goes on."""
    began, problem = seconds(), layers(2.0)
    found = problem.run(Auto(60.0, for_steps=STEPS).plan(problem))
    took = seconds() - began
    assert problem.fits(found)
    extra_s = (found.step_ms - problem.plain_step_ms) / 1000
    assert 0 < STEPS * extra_s < took < 10 * STEPS * extra_s < 6.0


def test_a_plan_that_costs_much_is_searched_for_longer(seconds: Callable[[], float]) -> None:
    took = list[float]()
    for milliseconds in (0.1, 20.0):
        began, problem = seconds(), layers(milliseconds)
        Auto(60.0, for_steps=STEPS).plan(problem)
        took.append(seconds() - began)
    assert took[1] > 5 * took[0]


def test_how_good_a_first_plan_is_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear program takes longer than most first searches."""

    def bound(problem: Problem, seconds: float) -> float:
        raise AssertionError

    monkeypatch.setattr(planner, "least_step_ms", bound)
    problem = layers(2.0)
    assert problem.fits(problem.run(Auto(60.0, for_steps=STEPS).plan(problem)))
    with pytest.raises(AssertionError):
        Auto(60.0).plan(layers(2.0))


class Stub(Auto):
    """Gives one plan for each problem, or none for the first."""

    def __init__(self, *, enough: bool, refuses: bool = False) -> None:
        super().__init__(1.0, for_steps=STEPS)
        self.enough, self.refuses = enough, refuses
        self.searched: list[Problem] = []

    def is_enough(self, extra_ms: float) -> bool:
        return self.enough

    def within(self, problem: Problem, seconds: float) -> Decisions:
        self.searched.append(problem)
        if self.refuses and len(self.searched) == 1:
            raise BudgetInfeasible(problem.budget_bytes, problem.floor_bytes)
        return {2: RECOMPUTE}


@pytest.mark.parametrize(
    ("enough", "refuses", "searched"),
    [(True, False, "p"), (False, False, "pm"), (True, True, "pm")],
    ids=["cheap", "dear", "none"],
)
def test_a_first_plan_moves_the_step_only_where_that_is_worth_it(
    enough: bool, refuses: bool, searched: str
) -> None:
    """No better plan takes over from one that does, so that the run as it is comes first."""
    view = TraceView(build(chain([400] * 6)))
    plain = Problem(view, Simulator(view), 2500)
    moved = Problem(view, Simulator(view), 2500, instead_of=plain)
    auto = Stub(enough=enough, refuses=refuses)
    problem, _ = plan_jointly(auto, moved)
    assert ["m" if each is moved else "p" for each in auto.searched] == [*searched]
    assert problem is (moved if refuses else plain)


@pytest.mark.parametrize("enough", [True, False])
def test_steps_in_pieces_are_not_looked_at_where_a_plan_is_enough(enough: bool) -> None:
    """To cut the step takes as long as a quick search."""
    view = TraceView(build(chain([400] * 6)))
    plain, looked = Problem(view, Simulator(view), 2500), list[int]()

    def in_pieces() -> list[Problem]:
        looked.append(1)
        return []

    def in_one() -> tuple[Problem, Decisions]:
        return plain, {2: RECOMPUTE}

    plan_with_pieces(Stub(enough=enough), plain, in_pieces, in_one, floor_bytes=0)
    assert bool(looked) != enough


def test_a_plan_imports_nothing_that_could_have_been_imported_before(tmp_path: Path) -> None:
    """The process has nothing to do until it is told what to plan for."""
    trace = tmp_path / "chain.profile.json.gz"
    build([Layer((1 + i % 5) * MIB, 2.0, (i - 1,)) for i in range(24)]).save(trace)
    code = f"""
import os, sys
from pathlib import Path
from memopt.advisors import background
background._import_all()
background._step_back = lambda limit_s: print(*sorted(set(sys.modules) - before))
before = {{*sys.modules, "logging", "traceback", "string", "_string", "atexit"}}
order = {{"trace": {str(trace)!r}, "budget": "60%", "allow": (), "deny": (), "time_limit_s": 0.3, "grown": 1.1, "alive": os.pipe()[1]}}
background._plan(order, Path({str(tmp_path / "plan.json")!r}))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=IMPORT_ROOT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "\n"
