"""The part of a batch that moDNN goes on with where no offload is enough: its size, peak and time, by hand."""

from __future__ import annotations

import msgspec
import pytest

from memopt.advisors.advise import advise
from memopt.advisors.counsel.sub_batch import SubBatch, largest_sub_batch
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.strategies.modnn import all_away
from memopt.device import Device
from memopt.errors import BudgetInfeasible, NotPossibleHere
from memopt.estimators.simulator.costs import HOOK_MS, MODE_MS, QUEUE_MS
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import CATEGORIES, Trace
from tests.support.layers_trace import build, chain

MIB = 1 << 20
GPU = Device(kind="cuda", host_out_bytes_per_s=1e12, host_in_bytes_per_s=1e12)


def batch_of_8() -> Trace:
    """Four layers of 8 MiB and their gradients; the one that is made first is a parameter's: it stays, and does not grow."""
    trace = build(chain([8 * MIB] * 4), device=GPU, state=16 * MIB)
    labels = ["Net.weight", "variable x · 8×1 int16", *["Net.out · 8×262144 fp32"] * 4]
    labels += ["gradient · 8×262144 fp32"] * 3 + ["gradient of Net.weight · 2097152 fp32"]
    storages = msgspec.structs.replace(
        trace.storages,
        label=[len(trace.strings) + i for i in range(len(labels))],
        category=[*trace.storages.category[:-1], CATEGORIES.index("gradient")],
        death_op=[*trace.storages.death_op[:-1], 8],
        size_bytes=[16 * MIB, 16, *[8 * MIB] * 8],
    )
    live = [held + (8 * MIB if op > 4 else 0) for op, held in enumerate(trace.ops.live_bytes)]
    return msgspec.structs.replace(
        trace,
        strings=[*trace.strings, *labels],
        storages=storages,
        ops=msgspec.structs.replace(trace.ops, live_bytes=live),
    )


def problem_of(trace: Trace, budget_bytes: int) -> Problem:
    view = TraceView(trace)
    return Problem(view, Simulator(view), budget_bytes)


def test_parts_are_halved_until_one_fits_beside_the_gradients_of_the_others() -> None:
    """Half a batch peaks at 40 MiB unplanned; a quarter at 32, and at 30 when one layer's 2 MiB are away at the turn. 8 are held."""
    trace = batch_of_8()
    assert largest_sub_batch(problem_of(trace, 60 * MIB), all_away) == SubBatch(4, 8, 48 * MIB + 8, 12.0)
    quarter = largest_sub_batch(problem_of(trace, 39 * MIB), all_away)
    assert quarter is not None
    assert (quarter.size, quarter.peak_bytes) == (2, 38 * MIB + 4)
    hooks_ms = 4 * MODE_MS + 4 * HOOK_MS
    copies_ms = 6 * QUEUE_MS + 2 * 2 * MIB / 1e9  # of the layer at the turn, out and back
    assert quarter.step_ms == pytest.approx(4 * (3.0 + hooks_ms + copies_ms))
    assert largest_sub_batch(problem_of(trace, 30 * MIB), all_away) is None


def test_modnns_refusal_tells_the_part() -> None:
    with pytest.raises(BudgetInfeasible, match="parts of 2 of the batch of 8"):
        advise(batch_of_8(), budget_bytes=39 * MIB, strategy="modnn")
    with pytest.raises(BudgetInfeasible, match="no part of the batch fits either"):
        advise(batch_of_8(), budget_bytes=30 * MIB, strategy="modnn")


def test_a_profile_that_tells_no_batch_has_no_parts() -> None:
    trace = build(chain([8 * MIB] * 4), device=GPU)
    with pytest.raises(NotPossibleHere):
        largest_sub_batch(problem_of(trace, 10 * MIB), all_away)
    with pytest.raises(BudgetInfeasible) as caught:
        advise(trace, budget_bytes=10 * MIB, strategy="modnn")
    assert "batch of" not in str(caught.value)
