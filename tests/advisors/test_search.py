"""The moves of the search."""

from __future__ import annotations

import random

import pytest

from memopt.advisors.clock import now
from memopt.advisors.profiles.auto import Auto, portfolio
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.profiles.search import Plan, Search
from memopt.device import Device
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import build, chain
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


MIB = 1 << 20
SLOW_LINK = Device(
    kind="cuda", host_out_bytes_per_s=5e8, host_in_bytes_per_s=5e8, copy_bytes_per_s=1e11
)  # 2 ms for what a layer makes in 1


@pytest.fixture
def late_copies() -> Search:
    """Eight layers whose outputs can all leave, but not before the peak: 6 MiB where 4 may be there."""
    view = TraceView(build(chain([MIB] * 8, [1.0] * 8), device=SLOW_LINK))
    return Search(Problem(view, Simulator(view), 4 * MIB + MIB // 2, margin=0.0), now() + 1000.0)


def all_swapped(search: Search) -> Plan:
    swaps = [(c.storage, c.option("swap")) for c in search.problem.candidates.values()]
    return search.judge({storage: swap for storage, swap in swaps if swap is not None})


def test_mending_makes_again_what_leaves_too_late(late_copies: Search) -> None:
    """All are away already: there is nothing to add."""
    plan = all_swapped(late_copies)
    assert len(plan.decisions) == len(late_copies.problem.candidates)
    assert not late_copies.fits(plan)
    mended = late_copies.mend(plan)
    assert late_copies.fits(mended)
    assert {each.kind for each in mended.decisions.values()} == {"swap", "recompute"}


def test_what_a_strategy_comes_to_that_misses_the_budget_is_a_start(late_copies: Search) -> None:
    starts = [late_copies.judge(each) for each in portfolio(late_copies, ("flashneuron",), until=0.0)]
    assert len(starts) == 1
    assert starts[0].decisions
    assert not late_copies.fits(starts[0])


def test_those_that_come_nearest_are_mended_and_no_dearer_than_what_fits(late_copies: Search) -> None:
    near, far = all_swapped(late_copies), late_copies.judge({})
    starts = {frozenset(plan.decisions): plan for plan in (far, near)}
    [found] = Auto(60.0)._nearest_mended(late_copies, starts)
    assert late_copies.fits(found)
    assert starts[frozenset(found.decisions)] is found or found.decisions.keys() == near.decisions.keys()
    cheaper = Plan({9: next(iter(near.decisions.values()))}, found.timeline, near.cost_ms / 2)
    assert not list(Auto(60.0)._nearest_mended(late_copies, {frozenset({9}): cheaper, frozenset(near.decisions): near}))  # fmt: skip


@pytest.mark.parametrize("time_limit_s", [0.0, 60.0])
def test_those_that_come_nearest_are_mended_for_longer_than_the_search_has(
    late_copies: Search, time_limit_s: float
) -> None:
    """Of thousands of tensors: a plan that comes later, and is good, makes the script wait for less than one whose steps take four plain ones."""
    late_copies.deadline = now()
    near = all_swapped(late_copies)
    found = list(Auto(time_limit_s)._nearest_mended(late_copies, {frozenset(near.decisions): near}))
    assert any(map(late_copies.fits, found)) == bool(time_limit_s)
