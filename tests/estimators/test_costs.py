"""What memopt's own code costs in a script: as measured there, within the noise as usual."""

from __future__ import annotations

import msgspec
import pytest

from memopt.advisors.profiles.codec_options import codec_costs_ms
from memopt.advisors.profiles.problem import Problem
from memopt.codecs.meta import TensorMeta
from memopt.codecs.table import CODECS
from memopt.estimators.simulator.costs import (
    CODE_MS,
    HOOK_MS,
    LOOKUP,
    MAKE_MS,
    MODE_MS,
    REPLAY_MS,
    pace_of,
    usual_ms,
)
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Trace, Watching, ops_of_phase
from tests.support.layers_trace import build, chain


@pytest.fixture
def trace() -> Trace:
    return build(chain([1 << 20] * 6))


def watched(trace: Trace, cost_ms: float, error_ms: float = 0.0) -> Trace:
    counts = ops_of_phase(trace, "forward"), len(trace.slots.node)
    return msgspec.structs.replace(trace, watching=Watching(*counts, cost_ms, error_ms))


def test_the_pace_is_what_was_measured_as_far_as_it_is_sure(trace: Trace) -> None:
    usual = MODE_MS * ops_of_phase(trace, "forward") + HOOK_MS * len(trace.slots.node)
    assert usual_ms(trace) == pytest.approx(LOOKUP * usual), "a plan also finds out what there is to do"
    assert pace_of(trace) == 1.0
    assert pace_of(watched(trace, 3 * usual)) == pytest.approx(3.0)
    assert pace_of(watched(trace, 3 * usual, 0.5 * usual)) == pytest.approx(2.5)
    assert pace_of(watched(trace, 3 * usual, 5 * usual)) == 1.0
    assert pace_of(watched(trace, -usual, 0.5 * usual)) == pytest.approx(0.3)
    on_gpu = msgspec.structs.replace(trace, device=msgspec.structs.replace(trace.device, kind="cuda"))
    assert pace_of(watched(on_gpu, -usual, 0.5 * usual)) == 1.0, (
        "how much more a busy GPU would hide is not known"
    )
    assert usual_ms(on_gpu) == pytest.approx(usual), "and nor is this"
    assert pace_of(watched(trace, 1e6)) == 20.0


def test_all_that_the_host_does_has_that_pace(trace: Trace) -> None:
    slow = watched(trace, 4 * (MODE_MS * ops_of_phase(trace, "forward") + HOOK_MS * len(trace.slots.node)))
    steps = []
    for each in (trace, slow):
        view = TraceView(each)
        problem = Problem(view, Simulator(view), 1)
        storage, option = next(
            (s, found) for s, c in problem.candidates.items() if (found := c.option("recompute")) is not None
        )
        steps.append(problem.run({storage: option}))
    usual, found = steps
    replayed = round((found.replay_ms - usual.replay_ms) / (3 * REPLAY_MS))
    assert replayed >= 1
    assert found.replay_ms - usual.replay_ms == pytest.approx(3 * REPLAY_MS * replayed, abs=1e-5)
    more_ms = 3 * (usual_ms(trace) + MAKE_MS) + found.replay_ms - usual.replay_ms
    assert found.step_ms - usual.step_ms == pytest.approx(more_ms, abs=1e-5)
    assert found.peak_bytes == usual.peak_bytes


def test_codecs_of_small_tensors_cost_what_finding_out_takes(trace: Trace) -> None:
    """26 dropout masks of half a MiB were priced at a third of what they took."""
    meta = TensorMeta(size=(8,), stride=(1,), storage_offset=0, dtype="float32", itemsize=4, device="cpu")
    encode, decode = codec_costs_ms(CODECS["two_valued"], meta, trace.device, 2.0, "")
    assert encode == pytest.approx(2 * CODE_MS, rel=0.01)
    assert decode == pytest.approx(2 * CODE_MS, rel=0.01)
    assert codec_costs_ms(CODECS["nothing"], meta, trace.device, 2.0, "") == (0.0, 0.0)


def test_where_nothing_is_decided_the_hooks_of_another_run_are_in_the_step(trace: Trace) -> None:
    view = TraceView(
        watched(trace, 3 * (MODE_MS * ops_of_phase(trace, "forward") + HOOK_MS * len(trace.slots.node)))
    )
    plain, other = Simulator(view).run({}), Simulator(view, hooked=True).run({})
    assert other.step_ms - plain.step_ms == pytest.approx(3 * HOOK_MS * len(trace.slots.node))
    assert other.peak_bytes == plain.peak_bytes
