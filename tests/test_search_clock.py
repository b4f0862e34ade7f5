"""A search has the processor's time: load by others does not shorten it, nor does waiting last for ever."""

from __future__ import annotations

import itertools
import time

import pytest

from memopt.advisors.auto import Auto
from memopt.advisors.clock import SearchClock
from memopt.advisors.problem import Problem
from memopt.errors import BudgetInfeasible
from memopt.estimators.timeline import Simulator
from memopt.estimators.trace_view import TraceView
from tests.layers_trace import Layer, build


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
