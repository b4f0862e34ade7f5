"""What the planner of graphs plans, told as decisions about storages."""

from __future__ import annotations

import itertools

import pytest

from memopt.advisors.clock import reading
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.profiles.starts.from_graph import Absence, graph_plans, told
from memopt.device import Device
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import Layer, build

MIB = 1 << 20


def problem(share: float, *, link: float = 0.0) -> Problem:
    layers = [Layer((1 + i % 3) * MIB, 10.0 + i % 4, (i - 1,), grad=MIB // 4) for i in range(24)]
    device = Device(kind="cuda", host_out_bytes_per_s=link, host_in_bytes_per_s=link)
    view = TraceView(build(layers, device=device))
    return Problem(view, Simulator(view, device), int(share * view.trace.peak_bytes), margin=0.0)


@pytest.mark.parametrize("link", [0.0, 1e8])
def test_a_schedule_of_the_graph_is_a_start_that_fits(link: float) -> None:
    asked = problem(0.6, link=link)
    looks = itertools.count()
    with reading(lambda: next(looks) / 512):
        plans = list(graph_plans(asked, 1.0))
        assert any(asked.fits(asked.run(plan)) for plan in plans)
        assert {d.kind for plan in plans for d in plan.values()} >= ({"swap"} if link else {"recompute"})


def test_what_is_away_is_told_by_how_it_comes_back() -> None:
    asked = problem(0.6, link=1e9)
    first, second, third, fourth, *_ = asked.candidates.values()
    span = first.away
    plan, held = told(
        asked,
        {
            first.saved.value: [Absence(span.start, span.stop - 1, copied=False)],
            second.saved.value: [Absence(second.away.start, second.away.stop - 1, copied=True)],
            third.saved.value: [
                Absence(third.away.start, third.away.start + 1, copied=False),
                Absence(third.away.start + 3, third.away.stop - 1, copied=False),
            ],
            fourth.saved.value: [Absence(fourth.away.stop, fourth.away.stop + 2, copied=False)],
        },
    )
    assert plan == {
        first.storage: RECOMPUTE,
        second.storage: second.option("swap"),
        third.storage: RECOMPUTE_AGAIN,
    }, "what leaves after it was asked for is no absence of a profile's"
    assert held[third.storage] == RECOMPUTE
