"""Recorded rounds planned once for each kind: exact where they are equal, valid by an independent walk where they are not."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.by_rounds import ByRounds
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.profiles.round_trace import trace_of
from memopt.advisors.profiles.rounds import find_kinds
from memopt.advisors.profiles.search import Search
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.costs import usual_ms
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Trace
from tests.support.layers_trace import Layer, build, chain, checked_peak
from tests.support.rounds_trace import accumulated

SIZES = (400, 300, 500, 200, 600)
MS = (1.0, 3.0, 0.5, 2.0, 4.0)


def problem_of(trace: Trace, share: float) -> Problem:
    view = TraceView(trace)
    allow = frozenset({"recompute"})
    return Problem(view, Simulator(view), int(share * trace.peak_bytes), allow, margin=0.0, time_limit_s=4.0)


def recomputed(decisions: Decisions) -> tuple[set[int], set[int]]:
    return set(decisions), {storage for storage, decision in decisions.items() if decision.again}


def test_equal_rounds_are_one_kind() -> None:
    view = TraceView(accumulated([chain(SIZES, MS)] * 6))
    first, others = sorted(find_kinds(view), key=len)
    assert [(each.begin, each.end) for each in first] == [(0, 10)]
    assert sorted((each.begin, each.end) for each in others) == [(10 * i, 10 * i + 10) for i in range(1, 6)]


@pytest.mark.parametrize(
    "trace",
    [
        build(chain(SIZES * 8, MS * 8)),
        accumulated([chain(SIZES, MS), chain(SIZES[:3], MS[:3])]),
        accumulated([chain(SIZES[: 2 + i], MS[: 2 + i]) for i in range(4)]),
    ],
)
def test_what_does_not_repeat_has_no_rounds(trace: Trace) -> None:
    assert find_kinds(TraceView(trace)) == []


@pytest.mark.parametrize("share", [0.9, 0.8, 0.75, 0.7])
def test_equal_rounds_cost_what_the_optimum_of_each_costs(share: float) -> None:
    rounds = 6
    trace = accumulated([chain(SIZES, MS)] * rounds)
    problem = problem_of(trace, share)
    one = problem_of(accumulated([chain(SIZES, MS)]), 1.0).with_target(problem.target_bytes - 50)
    alone = [c.storage for c in one.candidates.values()]
    least = min(
        timeline.step_ms - one.view.trace.step_ms - usual_ms(one.view.trace)
        for fates in itertools.product((None, RECOMPUTE, RECOMPUTE_AGAIN), repeat=len(alone))
        if any(fates)
        and one.fits(timeline := one.run({s: f for s, f in zip(alone, fates, strict=True) if f is not None}))
    )
    decisions = Auto(4.0).plan(problem)
    timeline = problem.run(decisions)
    peak = checked_peak(trace, *recomputed(decisions))
    assert peak == timeline.peak_bytes <= problem.target_bytes
    # The gradient is not yet there in the first round, which may cost less.
    most = rounds * least + trace.step_ms + usual_ms(trace)
    assert most - least - 1e-9 <= timeline.step_ms <= most + 1e-9


@pytest.mark.solver
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), share=st.floats(0.6, 0.95))
def test_rounds_that_differ_get_plans_that_hold(seed: int, share: float) -> None:
    rnd = random.Random(seed)
    rounds = [
        [
            Layer(int(size * rnd.uniform(0.9, 1.1)), ms * rnd.uniform(0.5, 1.5), (i - 1,))
            for i, (size, ms) in enumerate(zip(SIZES, MS, strict=True))
        ]
        for _ in range(5)
    ]
    trace = accumulated(rounds)
    problem = problem_of(trace, share)
    kinds = find_kinds(problem.view)
    assert sorted(len(kind) for kind in kinds) == [1, 4]
    try:
        decisions = Auto(0.5).plan(problem)
    except BudgetInfeasible as error:
        refused = error.min_peak_bytes
    else:
        refused = None
    if refused is not None:
        assert refused > problem.target_bytes
        return
    timeline = problem.run(decisions)
    assert timeline.peak_bytes <= problem.target_bytes
    assert checked_peak(trace, *recomputed(decisions)) == timeline.peak_bytes


def test_all_rounds_together_are_the_trace_again() -> None:
    trace = accumulated([chain(SIZES, MS), *[chain(SIZES[::-1], MS)] * 4])
    view = TraceView(trace)
    rounds = sorted((each for kind in find_kinds(view) for each in kind), key=lambda each: each.begin)
    again, storages = trace_of(view, rounds, trace.ops.time_us)
    assert storages == list(range(trace.storage_count))
    assert again == trace


def test_one_round_alone_is_judged_as_in_the_whole() -> None:
    trace = accumulated([chain(SIZES, MS)] * 5)
    problem = problem_of(trace, 0.7)
    kinds = find_kinds(problem.view)
    work = ByRounds(problem, kinds, 1.0, lambda *_: {})
    each = sorted(kinds, key=len)[1][2]
    part = work.alone(each)
    for storage in part.problem.candidates:
        inner: Decisions = {storage: RECOMPUTE}
        inside = part.problem.run(inner)
        whole = problem.run(part.outer(inner))
        assert inside.high_bytes.tolist() == whole.high_bytes[each.begin : each.end].tolist()
        assert inside.replay_ms == pytest.approx(whole.replay_ms)
        assert part.inner(part.outer(inner)) == inner


def test_ops_of_a_kind_take_the_means_of_its_rounds() -> None:
    rounds = [[Layer(100, 1.0 + i), Layer(200, 2.0, (0,))] for i in range(4)]
    problem = problem_of(accumulated(rounds), 0.9)
    work = ByRounds(problem, find_kinds(problem.view), 1.0, lambda *_: {})
    assert [len(kind) for kind in sorted(work.kinds, key=len)] == [1, 3]
    us = work.one_of_each.problem.view.trace.ops.time_us
    assert us == [1000.0, 2000.0, 2000.0, 2000.0, 3000.0, 2000.0, 2000.0, 2000.0]


def test_a_refusal_of_rounds_is_that_of_one_of_them() -> None:
    trace = accumulated([chain(SIZES, MS)] * 6)
    with pytest.raises(BudgetInfeasible) as caught:
        Auto(1.0).plan(problem_of(trace, 0.2))
    assert 0.2 * trace.peak_bytes < caught.value.min_peak_bytes < trace.peak_bytes
    Auto(1.0).plan(problem_of(trace, (caught.value.min_peak_bytes + 1) / trace.peak_bytes))


def test_ctrl_c_keeps_the_plan_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    trace = accumulated([chain(SIZES, MS)] * 6)
    problem = problem_of(trace, 0.8)
    monkeypatch.setattr(Search, "tear", interrupted)
    auto = Auto(60.0)
    decisions = auto.plan(problem)
    assert auto.interrupted
    assert problem.fits(problem.run(decisions))
