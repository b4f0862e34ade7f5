"""When a storage can be made again before its own consumer asks: exact numbers on a small net."""

from __future__ import annotations

import itertools

import pytest

from memopt.advisors.clock import reading
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.lower_bound import least_step_ms
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.profiles.starts.from_graph import Absence, told
from memopt.estimators.simulator.costs import REPLAY_MS
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_EARLY
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import Layer, build

PRODUCT, QUERY = 2, 3
"""Storages: of the first two layers."""


def sliced(after: int = 1) -> TraceView:
    """A product (storage 2, dear), a slice of it (3) that one layer saves, and a layer whose backward, which comes first, saves the product."""
    layers = [
        Layer(3000, 50.0, (-1,), saves=(), grad=10),
        Layer(1000, 1.0, (0,), saves=(), grad=10),
        Layer(10, 1.0, (1,), saves=(1,), grad=10),
        Layer(10, 1.0, (0, 2), saves=(0,), grad=10),
        *[Layer(2000, 1.0, (3 + i,), saves=(), grad=10) for i in range(after)],
    ]
    return TraceView(build(layers))


def problem_of(view: TraceView, budget_bytes: int = 1) -> Problem:
    return Problem(view, Simulator(view), budget_bytes, frozenset({"recompute"}), margin=0.0)


def test_what_is_made_of_something_that_goes_first_can_be_made_before() -> None:
    view = sliced()
    assert set(view.early) == {QUERY}
    assert view.early[QUERY].first_use == view.saved[PRODUCT].first_use < view.saved[QUERY].first_use
    assert view.asked_as(QUERY, early=False) is view.saved[QUERY]
    assert view.asked_as(PRODUCT, early=True) is view.saved[PRODUCT]


def test_it_is_made_of_what_is_there_then_and_stays() -> None:
    view = sliced()
    late, early = ({QUERY: decision} for decision in (RECOMPUTE, RECOMPUTE_EARLY))
    simulator, plain = Simulator(view), Simulator(view).run({})
    assert simulator.chains(late)[0][QUERY].ops == (0, 1)
    assert simulator.chains(early)[0][QUERY].ops == (1,)
    assert simulator.run(late).replay_ms == pytest.approx(51.0 + 2 * REPLAY_MS)
    assert simulator.run(early).replay_ms == pytest.approx(1.0 + REPLAY_MS)
    away = plain.live_bytes - simulator.run(early).live_bytes
    saved, use = view.saved[QUERY], view.early[QUERY].first_use
    assert (away[saved.gone_after + 1 : use] == 1000).all()
    assert (away[use:] <= 0).all(), "from then on the records hold the product as well"
    assert away[saved.first_use] == -3000


def test_with_the_product_gone_too_it_is_made_once_for_both() -> None:
    view = sliced()
    simulator = Simulator(view)
    both = {PRODUCT: RECOMPUTE, QUERY: RECOMPUTE_EARLY}
    assert {s: chain.ops for s, chain in simulator.chains(both)[0].items()} == {QUERY: (0, 1)}
    assert simulator.run(both).replay_ms == pytest.approx(51.0 + 2 * REPLAY_MS)
    twice = {PRODUCT: RECOMPUTE, QUERY: RECOMPUTE}
    assert simulator.run(twice).replay_ms == pytest.approx(50.0 + 51.0 + 3 * REPLAY_MS)


def test_auto_makes_it_early_where_that_suffices() -> None:
    view = sliced(after=3)
    problem = problem_of(view, view.trace.peak_bytes - 500)
    looks = itertools.count()
    with reading(lambda: next(looks) / 512):
        decisions = Auto(2.0).plan(problem)
    assert decisions == {QUERY: RECOMPUTE_EARLY}
    least = least_step_ms(problem, 5.0)
    assert least is None or least <= problem.run(decisions).step_ms


def test_a_schedule_that_runs_it_again_before_is_told_so() -> None:
    view = sliced()
    problem = problem_of(view)
    candidate = problem.candidates[QUERY]
    gone = Absence(candidate.away.start, view.early[QUERY].first_use - 1, copied=False)
    late = Absence(candidate.away.start, candidate.away.stop - 1, copied=False)
    plans = [next(told(problem, {candidate.saved.value: [each]})) for each in (gone, late)]
    assert plans == [{QUERY: RECOMPUTE_EARLY}, {QUERY: RECOMPUTE}]
