"""A search has the processor's time: load by others does not shorten it, nor does waiting last for ever."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest

from memopt.advisors.clock import SearchClock, reading, wall_s
from memopt.advisors.graphs.graph import decode_graph
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.problem import Problem
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import Layer, build
from tests.support.training_graphs.families import FAMILIES, chain


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    found = {"wall": 100.0, "processor": 7.0}
    monkeypatch.setattr(time, "monotonic", lambda: found["wall"])
    monkeypatch.setattr(time, "process_time", lambda: found["processor"])
    return found


@pytest.mark.parametrize(
    ("wall", "worked", "had"),
    [
        (2.0, 2.0, 2.0),
        (2.0, 1.0, 1.0),
        (6.0, 1.0, 2.0),
        (9.0, 0.0, 3.0),
        (2.0, 4.0, 2.0),
    ],
    ids=["alone", "beside another", "hardly let", "waiting", "with threads"],
)
def test_what_a_search_has_had(times: dict[str, float], wall: float, worked: float, had: float) -> None:
    now = SearchClock()
    begin = now()
    times["wall"] += wall
    times["processor"] += worked
    assert now() - begin == pytest.approx(had)
    assert now() - begin == pytest.approx(had)


def test_the_processor_is_not_asked_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some machines the system call takes 4 us and more; the simulator looks before each replay."""
    asked = itertools.count()
    wall = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: float(next(asked)))
    monkeypatch.setattr(time, "monotonic", lambda: 1e-5 * next(wall))
    now = SearchClock()
    for _ in range(1000):
        now()
    assert next(asked) < 20


def test_what_cannot_be_is_not_searched_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by 2 ms whenever it is looked at, the refusal ends within the time limit."""
    looks = itertools.count()
    monkeypatch.setattr(SearchClock, "__call__", lambda self: 0.002 * next(looks))
    layers = [Layer(1 << 20, 1.0, (i - 1,), replayable=i % 3 > 0) for i in range(60)]
    view = TraceView(build(layers, state=1 << 20))
    problem = Problem(view, Simulator(view), view.trace.peak_bytes // 5, margin=0.0)
    assert problem.floor_bytes > problem.target_bytes
    with pytest.raises(BudgetInfeasible):
        Auto(2.0).plan(problem)
    assert 0.002 * next(looks) < 2.0


def test_a_solver_that_watches_the_wall_has_as_much(times: dict[str, float]) -> None:
    clock = SearchClock()
    assert clock.stretch == 1.0
    for _ in range(3):
        times["wall"] += 1.0
        times["processor"] += 0.5
        clock()
    assert clock.stretch == pytest.approx(2.0)
    with reading(clock):
        assert wall_s(3.0) == pytest.approx(6.0)
    times["wall"] += 100.0
    clock()
    assert clock.stretch == pytest.approx(3.0), "however busy the machine is"


def test_no_search_looks_at_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall ran on while the planner of graphs waited for the processor: 0.8 s of 20 were left to it."""
    graph = decode_graph(msgspec.json.encode(chain(20, 1)))
    monkeypatch.setattr(time, "monotonic", lambda: pytest.fail("a search looked at the wall"))
    looks = itertools.count()
    with reading(lambda: 0.001 * next(looks)):
        plan_graph(graph, unplanned_peak(graph) // 2, time_limit_s=1.0)
    assert next(looks) > 500, "the limit is used"


@pytest.mark.parametrize(("name", "percent"), [("chain400", 30), ("branches24", 30), ("accumulation8", 40)])
def test_nothing_is_refused_before_every_quick_rule_had_its_turn(name: str, percent: int) -> None:
    """By a clock on which the time is up at every look."""
    graph = decode_graph(msgspec.json.encode(FAMILIES[name]()))
    looks = itertools.count()
    with reading(lambda: 1000.0 * next(looks)):
        schedule = plan_graph(graph, unplanned_peak(graph) * percent // 100)
    assert schedule.peak_bytes <= schedule.budget_bytes
