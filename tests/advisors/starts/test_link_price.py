"""Starts in which swaps pay for the time of the link that they take."""

from __future__ import annotations

import pytest

from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.profiles.starts.link_price import _FILLED, link_priced_plans
from memopt.device import Device
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import Layer, build

MIB = 1 << 20
LAYERS = 24
DEAR_MS, CHEAP_MS = 40.0, 5.0


def problem(share: float, *, link: float) -> Problem:
    """Layers of one size, every second one dear to make again; a gradient takes next to nothing."""
    layers = [Layer(MIB, CHEAP_MS if i % 2 else DEAR_MS, (i - 1,), grad=1024) for i in range(LAYERS)]
    device = Device(kind="cuda", host_out_bytes_per_s=link, host_in_bytes_per_s=link)
    view = TraceView(build(layers, device=device))
    return Problem(view, Simulator(view, device), int(share * view.trace.peak_bytes), margin=0.0)


def kinds(asked: Problem, plan: Decisions) -> dict[str, set[float]]:
    """Kind of decision -> what the ops take that make the tensors it is about."""
    found: dict[str, set[float]] = {}
    for storage, decision in plan.items():
        maker = int(asked.view.birth[storage])
        found.setdefault(decision.kind, set()).add(round(float(asked.view.op_ms[maker]), 3))
    return found


def test_what_is_dear_to_make_again_is_swapped_and_the_rest_made_again() -> None:
    link = 10 * MIB / (LAYERS * (DEAR_MS + CHEAP_MS) / 2 / 1000)
    asked = problem(0.4, link=link)
    plans = [place_prefetches(asked, plan) for plan in link_priced_plans(asked)]
    fitting = [plan for plan in plans if asked.fits(asked.run(plan))]
    assert {"swap": {DEAR_MS}, "recompute": {CHEAP_MS}} in [kinds(asked, plan) for plan in fitting]


@pytest.mark.parametrize("megabytes", [2, 4, 6])
def test_the_link_is_filled_to_a_share_of_its_time_until_the_peak(megabytes: int) -> None:
    window_s = LAYERS * (DEAR_MS + CHEAP_MS) / 2 / 1000
    asked = problem(0.3, link=megabytes * MIB / window_s)
    counts = {sum(d.kind == "swap" for d in plan.values()) for plan in link_priced_plans(asked)}
    assert max(counts) <= max(_FILLED) * megabytes
    assert max(counts) >= int(0.9 * megabytes) - 1


def test_without_a_link_there_is_nothing_to_price() -> None:
    assert list(link_priced_plans(problem(0.5, link=0.0))) == []
