"""Planners on profiles of real nets (the benchmark models, tiny): auto against all, bounds, arenas, closed forms, other batch sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memopt.advisors.advise import Adviser
from memopt.advisors.clock import now
from memopt.advisors.counsel.buffer_sharing import static_layout
from memopt.advisors.counsel.megatron import traced_figures, transformer_of
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.max_batch import Batches
from memopt.advisors.profiles.lower_bound import least_step_ms
from memopt.advisors.profiles.search import Search
from memopt.advisors.registry import profile_strategies
from memopt.devices import DeviceSpec
from memopt.errors import BudgetInfeasible, NotPossibleHere, UsageError
from memopt.estimators.elsewhere import from_profile
from memopt.estimators.elsewhere.retrace import retrace
from memopt.estimators.elsewhere.trace_batch import trace_at_batch
from memopt.estimators.recording import Recording
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Trace
from tests.support.plan_walks import assert_walk_is_exact
from tests.support.profiled import ROOT, Profiler, profiler

TRAIN = str(ROOT / "benchmarks" / "train.py")
MODELS = ("mobilenet_v2", "encoder")
LIMIT_S = 4.0


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    with profiler(tmp_path_factory.mktemp("profiles")) as server:
        yield server


@pytest.fixture(scope="module")
def traces(profile: Profiler) -> dict[str, Trace]:
    options = ("--scale", "tiny", "--steps", "5")
    return {name: profile(TRAIN, name, *options, "--batch", "4", options=()).trace for name in MODELS}


@pytest.mark.parametrize("share", [0.8, 0.55])
@pytest.mark.parametrize("name", MODELS)
def test_auto_is_at_least_as_good_as_every_strategy(
    traces: dict[str, Trace], name: str, share: float
) -> None:
    adviser = Adviser(traces[name], DEFAULT_ALLOW, LIMIT_S)
    problem = adviser.problem(int(share * adviser.unplanned_peak_bytes))
    steps: dict[str, float] = {}
    for strategy in profile_strategies():
        try:
            timeline = problem.run(adviser.strategy(strategy).plan(problem))
        except (BudgetInfeasible, NotPossibleHere):
            continue
        assert problem.fits(timeline), strategy
        steps[strategy] = timeline.step_ms
    assert steps
    assert steps["auto"] <= min(steps.values()) * (1 + 1e-5), steps
    bound = least_step_ms(problem, 5)
    assert bound is None or bound <= min(steps.values()) + 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_the_arena_is_within_two_percent_of_what_lives_at_once(traces: dict[str, Trace], name: str) -> None:
    layout, _ = static_layout(traces[name])
    assert layout.lower_bound_bytes == pytest.approx(traces[name].peak_bytes, rel=0.02)  # lines of 64 bytes
    assert layout.overhead <= 0.02


def test_closed_forms_agree_with_an_encoder(traces: dict[str, Trace]) -> None:
    """Two layers of width 32 with 4 heads and a feed-forward of 64, as `benchmarks.models` builds it; 32 tokens, 4 sequences."""
    view = TraceView(traces["encoder"])
    found, traced = transformer_of(view), traced_figures(view)
    assert (found.layers, found.width, found.heads, found.feed_forward) == (2, 32, 4, 64)
    assert (found.batch, found.length, found.vocabulary, found.fused) == (4, 32, 64, False)
    assert found.layer_parameters + 32 * found.table_rows == pytest.approx(traced["parameters"], rel=0.01)
    assert found.forward_flops == pytest.approx(traced["forward_flops"], rel=0.1)


def test_no_closed_form_for_a_convolutional_net(traces: dict[str, Trace]) -> None:
    with pytest.raises(NotPossibleHere):
        transformer_of(TraceView(traces["mobilenet_v2"]))


def test_a_scaled_trace_is_like_a_recorded_one(profile: Profiler, traces: dict[str, Trace]) -> None:
    recorded = profile(
        TRAIN, "mobilenet_v2", "--scale", "tiny", "--steps", "5", "--batch", "12", options=()
    ).trace
    scaled = trace_at_batch(traces["mobilenet_v2"], 4, 12)
    assert scaled.script.argv[-1] == "12"
    assert scaled.peak_bytes == pytest.approx(recorded.peak_bytes, rel=0.02)
    assert scaled.slots.shape == recorded.slots.shape
    assert scaled.slots.stride == recorded.slots.stride
    assert trace_at_batch(traces["mobilenet_v2"], 4, 4) is traces["mobilenet_v2"]


def test_a_flag_that_the_script_does_not_heed_is_refused(
    traces: dict[str, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run with it, the script takes what it took without; so it is said, too, where the one run was followed for fewer steps."""

    def shorter(trace: Trace, argv: list[str], spec: DeviceSpec, **kwargs: Any) -> tuple[Recording, bool]:
        whole, partial = retrace(trace, argv, spec, **kwargs)
        if "--seed" not in argv:
            return whole, partial
        events = whole.events[: [at for kind, at in whole.marks if kind == "step"][1]]
        return replace(whole, rows=whole.rows[: max(events)], events=events), partial

    monkeypatch.setattr(from_profile, "retrace", shorter)
    trace = traces["mobilenet_v2"]
    search = Batches(trace, 2 * trace.peak_bytes, DEFAULT_ALLOW, 0.8, flag="--seed")
    with pytest.raises(UsageError, match="--seed does not set the script's batch size"):
        search.plain()
    with pytest.raises(UsageError, match="allocates the same on fake tensors"):
        from_profile.estimate_trace(trace, batch_size=12, batch_arg="--seed", device="a100-40gb")


def test_a_plan_makes_room_for_a_larger_batch(traces: dict[str, Trace], tmp_path: Path) -> None:
    trace = traces["mobilenet_v2"]
    search = Batches(trace, 2 * trace.peak_bytes, DEFAULT_ALLOW, 0.8)
    plain, planned = search.plain(), search.planned()
    assert plain.method == "re-traced"
    assert plain.batch in (7, 8)
    assert plain.peak_bytes <= search.budget_bytes
    assert planned.batch > plain.batch
    assert planned.plan is not None
    assert planned.peak_bytes <= search.budget_bytes
    assert planned.plan.script.argv[-1] == str(planned.batch)


@pytest.mark.parametrize("name", MODELS)
def test_the_judge_is_exact_from_plan_to_plan(traces: dict[str, Trace], name: str) -> None:
    """Starting where the plan before ended gives what simulating the plan whole gives."""
    adviser = Adviser(traces[name], DEFAULT_ALLOW, LIMIT_S)
    problem = adviser.problem(int(0.5 * adviser.unplanned_peak_bytes))
    assert_walk_is_exact(problem.view.trace, random.Random(0), 40)
    search = Search(problem, now() + LIMIT_S)
    plan = search.judge({})
    for _ in range(20):
        plan = search.tear(search.mend(plan))
        whole = problem.simulator.run(plan.decisions, whole=True)
        assert (whole.peak_bytes, whole.step_ms) == (plan.peak_bytes, plan.cost_ms)
        assert (whole.high_bytes == plan.timeline.high_bytes).all()
