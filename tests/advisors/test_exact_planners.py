"""The programs behind the planners: bounds that brute force cannot undercut, optima that it confirms, exact numbers on small nets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.lower_bound import always_rerun, least_step_ms, watching_ms
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.program import Program
from memopt.advisors.registry import find_strategy
from memopt.advisors.strategies.rotor import optima
from memopt.device import Device
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.costs import QUEUE_MS, REPLAY_MS
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Trace
from tests.support.layers_trace import Layer, build, chain

pytest.importorskip("highspy")

MIB = 1 << 20
RECOMPUTE_ONLY = frozenset({"recompute"})
LINK = Device(kind="cuda", host_out_bytes_per_s=1.5e9, host_in_bytes_per_s=1e9)


def problem_of(trace: Trace, budget: int, allow: frozenset[str] = RECOMPUTE_ONLY) -> Problem:
    view = TraceView(trace)
    return Problem(view, Simulator(view), budget, allow, margin=0.0, time_limit_s=20)


def every_decision(problem: Problem) -> list[Decisions]:
    """All combinations of options; a swap with every moment at which it could be fetched, a replay that keeps and one that does not."""
    choices = []
    for candidate in problem.candidates.values():
        options = [None]
        for option in candidate.options:
            options.append(option)
            if option.kind == "recompute":
                options.append(replace(option, again=True))
            if option.kind == "swap":
                options += [
                    replace(option, prefetch_op=int(op))
                    for op in problem.triggers
                    if candidate.away.start <= op < candidate.away.stop
                ]
        choices.append([(candidate.storage, option) for option in options])
    return [{s: o for s, o in picks if o is not None} for picks in itertools.product(*choices)]


def optimum(problem: Problem, *, as_the_paper: bool = False) -> tuple[float, int]:
    """(shortest step that fits, infinite when none does; lowest peak of all). `as_the_paper`: each tensor is made again once at most, and
    when it is asked for."""
    every = every_decision(problem)
    plans = [p for p in every if not (as_the_paper and any(d.again or d.early for d in p.values()))]
    timelines = [problem.run(plan) for plan in plans]
    fitting = [t.step_ms for t in timelines if problem.fits(t)]
    return min(fitting, default=float("inf")), min(t.peak_bytes for t in timelines)


nets = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 2), st.booleans(), st.booleans()),
    min_size=2,
    max_size=5,
)


def random_net(rows: list[tuple[int, int, int, bool, bool]]) -> list[Layer]:
    """Skips, layers whose output nobody saves, and ReLUs, for which one bit is enough."""
    layers = []
    for i, (size, ms, skip, saved, relu) in enumerate(rows):
        reads = tuple(sorted({i - 1, max(-1, i - 1 - skip)}))
        node = "ReluBackward0" if relu and saved else "ExpBackward0"
        saves = (i,) if saved else tuple(r for r in reads if r >= 0)
        needs = '{"needs_input_grad": [true]}'
        layers.append(Layer(size * MIB // 2, ms, reads, saves, node=node, attributes=needs, grad=MIB // 4))
    return layers


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(nets, st.floats(0.25, 0.98), st.sampled_from([RECOMPUTE_ONLY, DEFAULT_ALLOW]))
def test_no_plan_undercuts_the_bound_or_the_floor(
    rows: list[tuple[int, int, int, bool, bool]], share: float, allow: frozenset[str]
) -> None:
    trace = build(random_net(rows), state=50, device=LINK)
    problem = problem_of(trace, max(1, int(share * trace.peak_bytes)), allow)
    if len(every_decision(problem)) > 4000:
        return
    best_ms, lowest = optimum(problem)
    bound = least_step_ms(problem, 10)
    assert bound is not None
    assert bound <= best_ms + 1e-9
    assert problem.floor_bytes <= lowest


@settings(max_examples=60, deadline=None)
@given(nets, st.floats(0.25, 0.98))
@example(
    [(1, 1, 0, False, False)] * 2
    + [(1, 1, 0, True, False), (1, 1, 0, False, False), (4, 1, 2, False, False)],
    0.875,
)
def test_checkmate_is_optimal_on_small_nets(
    rows: list[tuple[int, int, int, bool, bool]], share: float
) -> None:
    trace = build(random_net(rows), state=50)
    problem = problem_of(trace, max(1, int(share * trace.peak_bytes)))
    best_ms, _ = optimum(problem, as_the_paper=True)
    if best_ms == float("inf"):
        with pytest.raises(BudgetInfeasible):
            find_strategy("checkmate").plan(problem)
    else:
        assert problem.run(find_strategy("checkmate").plan(problem)).step_ms == pytest.approx(best_ms)


def test_the_bound_of_a_chain_by_hand() -> None:
    """800 of the bytes at the peak must go: the outputs at 1 and at 2 ms, each with its replay; half a tensor more costs half as much."""
    trace = build(chain([400] * 6, [9, 1, 9, 2, 9, 9]))
    problem = problem_of(trace, trace.peak_bytes - 800)
    base = trace.step_ms + watching_ms(problem)
    assert least_step_ms(problem, 5) == pytest.approx(base + 3 + 2 * REPLAY_MS, rel=1e-4)
    relaxed = problem.with_target(trace.peak_bytes - 600)
    assert base + 1 < least_step_ms(relaxed, 5) <= base + 3 + 2 * REPLAY_MS + 1e-9


def test_what_is_gone_for_good_runs_again_too() -> None:
    """Layer 1 is read by layer 2 alone and saved by nobody: to make layer 2 again, it runs as well."""
    layers = [
        Layer(400, 3, (-1,)),
        Layer(400, 5, (0,), ()),
        Layer(400, 1, (1,)),
        Layer(400, 1, (2,)),
        Layer(400, 1, (3,)),
    ]
    problem = problem_of(build(layers), 2500)
    assert always_rerun(problem, problem.candidates[4]) == {1, 2}


def test_nothing_is_claimed_where_nothing_can_be_met() -> None:
    problem = problem_of(build(chain([400] * 6), state=5000), 5100)
    assert least_step_ms(problem, 5) == float("inf")


def test_rotor_finds_the_optimum_of_a_chain() -> None:
    """Every way to cut four stages into kept ones and stretches that run again, by brute force."""
    saved, enters, again = [4, 6, 2, 8], [0, 1, 2, 1], [3.0, 1.0, 5.0, 2.0]
    for stretches in optima(saved, enters, again):
        assert all(a < b for a, b in stretches)
    plans = {tuple(s) for s in optima(saved, enters, again)}
    for total in range(8, 21):
        best = min(
            (cost for cost, need in _all_cuts(saved, enters, again) if need <= total), default=float("inf")
        )
        reached = min(
            (_cost(p, again) for p in plans if _need(p, saved, enters) <= total), default=float("inf")
        )
        assert reached == best


def _all_cuts(saved: list[int], enters: list[int], again: list[float]) -> list[tuple[float, int]]:
    count = len(saved)
    found = []
    for marks in itertools.product((0, 1, 2), repeat=count):  # 0 kept, 1 a stretch begins, 2 it goes on
        if any(b == 2 and a == 0 for a, b in itertools.pairwise((0, *marks))):
            continue
        stretches = []
        for at, mark in enumerate(marks):
            if mark == 1:
                stretches.append([at, at + 1])
            elif mark == 2:
                stretches[-1][1] = at + 1
        plan = tuple((a, b) for a, b in stretches)
        found.append((_cost(plan, again), _need(plan, saved, enters)))
    return found


def _cost(plan: tuple[tuple[int, int], ...], again: list[float]) -> float:
    return sum(sum(again[a:b]) for a, b in plan)


def _need(plan: tuple[tuple[int, int], ...], saved: list[int], enters: list[int]) -> int:
    """Memory that the plan needs: what is kept, and at each stretch all that it saves beside what is kept before it."""
    stretch_at = dict(plan)
    kept = most = at = 0
    before_again = False
    while at < len(saved):
        end = stretch_at.get(at)
        if end is None:
            kept += saved[at]
            at, before_again = at + 1, False
        else:
            kept += enters[at] if before_again else 0
            most = max(most, kept + sum(saved[at:end]))
            at, before_again = end, True
        most = max(most, kept)
    return most


def test_rotor_keeps_what_is_dear() -> None:
    """Of six stages the dear ones stay; the cheap ones, 1 ms each, run again one by one."""
    trace = build(chain([400] * 6, [50, 1, 50, 1, 50, 1]), state=0)
    problem = problem_of(trace, trace.peak_bytes - 800)
    decisions = find_strategy("rotor").plan(problem)
    assert set(decisions) == {3, 5}


def test_autotm_takes_what_hides() -> None:
    """One tensor must go; the copies of the first hide behind 100 ms of others, those of the last would not."""
    trace = build([Layer(4 * MIB, 10, (i - 1,), grad=MIB, backward_ms=12) for i in range(10)], device=LINK)
    problem = problem_of(trace, trace.peak_bytes - 4 * MIB, frozenset({"swap-host"}))
    timeline = problem.run(find_strategy("autotm").plan(problem))
    assert timeline.stall_ms == 0
    assert timeline.peak_bytes <= problem.target_bytes


def test_autotm_pays_where_it_must() -> None:
    """The first output is wanted last, at 75 ms; it may come back from 45 ms on, when the peak is over, and takes 42 ms."""
    slow = Device(kind="cuda", host_out_bytes_per_s=1e9, host_in_bytes_per_s=1e8)
    trace = build([Layer(4 * MIB, 5, (i - 1,), grad=MIB, backward_ms=5) for i in range(8)], device=slow)
    problem = problem_of(trace, trace.peak_bytes - 4 * MIB, frozenset({"swap-host"}))
    timeline = problem.run(find_strategy("autotm").plan(problem))
    assert problem.fits(timeline)
    copy_ms = 4 * MIB / 1e8 * 1000
    assert timeline.stall_ms == pytest.approx(45 + copy_ms - 75 - QUEUE_MS)
    assert timeline.step_ms == pytest.approx(80 + 2 * QUEUE_MS + watching_ms(problem) + timeline.stall_ms)


@pytest.mark.parametrize("strategy", ["checkmate", "autotm"])
def test_what_cannot_be_met_is_told_with_the_smallest_peak(strategy: str) -> None:
    """No answer of the program at all; still the error knows what letting go of everything comes to."""
    trace = build([Layer(4 * MIB, 10, (i - 1,), grad=MIB) for i in range(10)], device=LINK, state=60 * MIB)
    problem = problem_of(trace, 61 * MIB, DEFAULT_ALLOW)
    with pytest.raises(BudgetInfeasible) as caught:
        find_strategy(strategy).plan(problem)
    assert caught.value.min_peak_bytes < trace.peak_bytes


def test_a_program_without_a_solution_says_so() -> None:
    program = Program()
    column = program.column(1.0, whole=True)
    program.row({column: 1.0}, low=2.0)
    solved = program.solve(1)
    assert solved.values is None
    assert solved.bound == float("inf")


def test_a_program_by_hand() -> None:
    """Cover 3 with pieces of 2: two whole ones, or one and a half."""
    program = Program()
    first, second = program.column(1.0, whole=True), program.column(1.5, whole=True)
    program.row({first: 2.0, second: 2.0}, low=3.0)
    assert program.solve(1).bound == pytest.approx(2.5)
    assert program.solve(1, relaxed=True).bound == pytest.approx(1.75)
