"""The moves of the search."""

from __future__ import annotations

import random

import pytest

from memopt.advisors.clock import now
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.profiles.search import Search
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import build
from tests.support.plan_walks import random_layers


@pytest.mark.parametrize("seed", [94, 147, 185])
def test_mending_ends_where_it_comes_back_to_a_plan(seed: int) -> None:
    """On these nets what lowers the peak raises what is above the target in sum, and the other way round."""
    trace = build(random_layers(random.Random(seed)))
    view = TraceView(trace)
    problem = Problem(
        view, Simulator(view), int(0.3 * trace.peak_bytes), frozenset({"recompute"}), margin=0.0
    )
    search = Search(problem, now() + 1000.0)
    search.mend(search.judge({}), power=2.0, most=300)
    assert search.evaluations < 150
