"""Checkpoints as a first plan where nothing quick fits, and what is taken away from it again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from memopt.advisors.advise import Adviser
from memopt.advisors.clock import reading
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.profiles.search import Search
from memopt.advisors.profiles.starts.checkpoints import (
    last_resorts,
    lightened,
    middle_first,
    swept,
)
from memopt.advisors.strategies.sublinear import sublinear_plans
from memopt.estimators.simulator.decision import RECOMPUTE_AGAIN
from memopt.trace import load_trace
from tests.support.layers_trace import Layer, build, chain

GPT2 = Path(__file__).parents[3] / "benchmarks" / "gpu" / "data" / "profiles" / "h100_gpt2_16_bf16.json.gz"


def problem_of(layers: Sequence[Layer], share: float) -> Problem:
    adviser = Adviser(build(layers, state=10), frozenset({"recompute"}))
    return adviser.problem(int(share * adviser.unplanned_peak_bytes), margin=0.0)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2, 0.1, 0.07])
def test_a_chain_is_brought_down_to_a_few_of_its_tensors(share: float) -> None:
    """A hundred tensors: of plans whose replays are held, the lowest has a fifth of the peak."""
    problem = problem_of(chain([10] * 100), share)
    plans = [*last_resorts(problem, [])]
    assert any(problem.fits(problem.run(plan)) for plan in plans)
    assert len(plans) <= math.log2(100) + 4
    assert {decision for plan in plans for decision in plan.values()} == {RECOMPUTE_AGAIN}


def test_none_is_left_where_nothing_fits() -> None:
    problem = problem_of(chain([10] * 100), 0.001)
    plans = [*last_resorts(problem, [])]
    assert len(plans[-1]) == len(problem.candidates)
    assert not problem.fits(problem.run(plans[-1]))


@pytest.mark.parametrize("share", [0.5, 0.2, 0.1])
def test_what_need_not_be_is_taken_away(share: float) -> None:
    """From every tensor made again for each op that asks, in far fewer judgements than there are pairs of tensors."""
    problem = problem_of(chain([10] * 100), share)
    search = Search(problem, math.inf)
    first = search.judge(dict.fromkeys(problem.candidates, RECOMPUTE_AGAIN))
    plans = [first, *lightened(search, first)]
    assert all(search.fits(plan) for plan in plans)
    costs = [plan.cost_ms for plan in plans]
    assert costs == sorted(costs, reverse=True)
    plain_ms = problem.view.trace.step_ms
    assert costs[-1] - plain_ms < 0.2 * (costs[0] - plain_ms)
    assert search.evaluations < 12 * len(problem.candidates)


def test_a_sweep_begins_with_the_square_root() -> None:
    problem = problem_of(chain([10] * 100), 0.3)
    kept = [len(problem.candidates) - len(plan) for plan in middle_first(sublinear_plans(problem))]
    assert 8 <= kept[0] <= 12
    assert {kept[-1], kept[-2]} & {0, 1, 99, 100}


@pytest.mark.solver
def test_a_low_budget_is_met_in_a_short_search() -> None:
    """GPT-2 as it was recorded on an H100, at a budget below what is there at once in the run as it is. Without checkpoints to begin with, none
    was found in that time."""
    adviser = Adviser(load_trace(GPT2), frozenset({"recompute", "swap-host", "optimizer"}), 1.0)
    looks = itertools.count()
    with reading(lambda: 0.0002 * next(looks)):
        problem, decisions, _ = adviser.decide(int(0.53 * adviser.unplanned_peak_bytes))
    assert problem.pieces is not None
    assert problem.run(decisions).step_ms < 4 * problem.plain_step_ms


def test_there_is_a_plan_when_the_quick_rules_took_the_time() -> None:
    """At 60 % none of them fits."""
    adviser = Adviser(load_trace(GPT2), frozenset({"recompute"}))
    problem = adviser.problem(int(0.6 * adviser.unplanned_peak_bytes))
    looks = itertools.count()
    with reading(lambda: 0.0001 * next(looks)):
        decisions = Auto(0.25).plan(problem)
    assert problem.run(decisions).step_ms < 3 * problem.plain_step_ms


def test_weights_leave_beside_checkpoints_that_do_not_fit_alone() -> None:
    adviser = Adviser(load_trace(GPT2), frozenset({"recompute", "swap-host"}))
    problem = adviser.problem(int(0.56 * adviser.unplanned_peak_bytes))
    plans = swept(problem, sublinear_plans(problem))
    assert not any(problem.fits(problem.run(plan)) for plan in plans)
    search = Search(problem, math.inf)
    judged = [search.judge(plan) for plan in last_resorts(problem, plans)]
    lowest = min(judged, key=lambda plan: plan.peak_bytes)
    assert any(problem.candidates[storage].saved.is_weight for storage in lowest.decisions)
    assert lowest.peak_bytes < problem.run(plans[0]).peak_bytes


def test_what_was_not_judged_in_time_is_left_out() -> None:
    problem = problem_of(chain([10] * 100), 0.3)
    sweep = [*sublinear_plans(problem)]
    looks = itertools.count()
    with reading(lambda: 1.0 * next(looks)):
        plans = swept(problem.limited(5.0), sweep)
    assert 0 < len(plans) < len(sweep)
    assert all(plan in sweep for plan in plans)
    peaks = [problem.run(plan).peak_bytes for plan in plans]
    assert peaks == sorted(peaks)
