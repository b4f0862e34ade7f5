"""Going from one plan to the next gives exactly what simulating each plan whole gives."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from memopt.estimators.simulator.decision import RECOMPUTE, Decision
from memopt.estimators.simulator.sums import on_grid
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import Layer, build
from tests.support.plan_walks import (
    GPU,
    Plan,
    assert_same,
    assert_walk_is_exact,
    next_plan,
    random_layers,
    random_trace,
)


@pytest.mark.parametrize("seed", range(8))
def test_any_walk_over_plans_is_as_exact_as_simulating_each_whole(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        assert_walk_is_exact(random_trace(rng), rng, 12)


def test_a_plan_costs_the_same_after_thousands_of_others() -> None:
    rng = random.Random(1)
    view = TraceView(build([*random_layers(rng), *random_layers(rng)], device=GPU))
    simulator, plan, first = Simulator(view), Plan(), Plan()
    for _ in range(9):
        first = next_plan(rng, view, first)
    before = simulator.run(first)
    for _ in range(3000):
        plan = next_plan(rng, view, plan)
        simulator.run(plan)
    assert_same(before, simulator.run(first))
    assert_same(before, simulator.run(first, whole=True))


def test_an_evaluation_that_was_broken_off_leaves_nothing_behind() -> None:
    view = TraceView(build([Layer(100, 1.0, (i - 1,)) for i in range(12)], device=GPU))
    simulator = Simulator(view)
    plan = dict.fromkeys(view.saved, RECOMPUTE)
    looks = iter(range(5))
    with pytest.raises(StopIteration):
        simulator.run(plan, still_wanted=lambda: next(looks) and None)
    assert_same(simulator.run(plan), Simulator(view).run(plan))


def test_times_on_the_grid_add_up_the_same_in_any_order() -> None:
    rng = random.Random(0)
    times = [on_grid(rng.uniform(0.0, 1e4)) for _ in range(1000)]
    total = sum(times)
    rng.shuffle(times)
    assert sum(times) == total
    assert sum(-each for each in times) + total == 0.0
    assert on_grid(float("inf")) == on_grid(2.0**23)
    assert abs(on_grid(0.1) - 0.1) < 1e-8


def test_prefetches_alone_change_the_copies_alone() -> None:
    view = TraceView(build([Layer(100, 1.0, (i - 1,)) for i in range(8)], device=GPU))
    simulator = Simulator(view)
    late = {storage: Decision(kind="swap", tier="host") for storage in view.saved}
    early = {s: replace(d, prefetch_op=view.saved[s].first_use - 1) for s, d in late.items()}
    assert simulator.run(late).stall_ms > simulator.run(early).stall_ms
    assert_same(simulator.run(early), Simulator(view).run(early))


def test_a_swap_passes_the_link_in_the_bytes_that_it_says() -> None:
    view = TraceView(build([Layer(1000, 1.0, (i - 1,)) for i in range(8)], device=GPU))
    simulator = Simulator(view)
    whole = {storage: Decision(kind="swap", tier="host") for storage in view.saved}
    half = {storage: replace(decision, encoded_bytes=500) for storage, decision in whole.items()}
    assert 0 < simulator.run(half).stall_ms < simulator.run(whole).stall_ms
    assert simulator.copy_ms(1000, half[2], out=True) == simulator.copy_ms(1000, whole[2], out=True) / 2
