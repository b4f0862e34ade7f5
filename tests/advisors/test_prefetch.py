"""When swapped storages come back."""

from __future__ import annotations

import random

import pytest

from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.device import Device
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import Layer, build

MIB = 1 << 20
COPY_MS = 10.0
"""Of a megabyte."""


def all_swapped(sizes: list[int], backward_ms: float) -> tuple[Problem, Decisions]:
    """A chain whose every tensor of `sizes` megabytes is swapped, with room for all of them at once."""
    layers = [
        Layer(size * MIB, 4 * backward_ms, (i - 1,), backward_ms=backward_ms, grad=1024)
        for i, size in enumerate(sizes)
    ]
    rate = MIB / COPY_MS * 1000
    view = TraceView(
        build(layers, device=Device(kind="cuda", host_out_bytes_per_s=rate, host_in_bytes_per_s=rate))
    )
    problem = Problem(view, Simulator(view), view.trace.peak_bytes, frozenset({"swap-host"}), margin=0.0)
    chosen = {c.storage: swap for c in problem.candidates.values() if (swap := c.option("swap"))}
    return problem, place_prefetches(problem.with_target(2 * view.trace.peak_bytes), chosen)


def test_copies_that_fill_the_link_come_back_no_earlier_one_after_the_other() -> None:
    problem, placed = all_swapped([1] * 40, COPY_MS)
    view = problem.view
    leads = [
        float(view.start_ms[view.saved[s].first_use] - view.start_ms[d.prefetch_op])
        for s, d in placed.items()
        if d.prefetch_op >= 0
    ]
    assert len(leads) > 30
    assert max(leads) <= 1.25 * COPY_MS + COPY_MS, "a copy, its slack, and the moments lie that far apart"
    assert problem.run(placed).stall_ms <= COPY_MS, "what is asked for first cannot be there in time"


@pytest.mark.parametrize("seed", range(4))
def test_what_is_needed_first_is_started_first(seed: int) -> None:
    rnd = random.Random(seed)
    problem, placed = all_swapped([rnd.choice((1, 1, 2, 9)) for _ in range(30)], 4 * COPY_MS)
    saved = problem.view.saved
    starts = [placed[s].prefetch_op for s in sorted(placed, key=lambda s: saved[s].first_use)]
    starts = [op for op in starts if op >= 0]
    assert len(starts) > 20
    assert starts == sorted(starts)
