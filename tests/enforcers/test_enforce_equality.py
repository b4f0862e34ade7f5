"""Whatever a plan says, the enforced loop computes what the plain one does, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.enforced import (
    Loop,
    all_again,
    any_mixture,
    enforced,
    everything,
    plan_of,
    recorded,
    seeded,
)
from tests.support.loops import LOOPS, moving_threshold

STEPS = 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_enforced_is_plain(loop: Loop, tmp_path: Path) -> None:
    plain = seeded(loop, STEPS)
    trace = recorded(loop, tmp_path)
    assert seeded(loop, STEPS) == plain, "the loop does not repeat, or the profiler left something behind"
    total = 0
    choices = {kind: everything(kind) for kind in ("recompute", "compress", "swap")}
    choices["again"] = all_again
    choices |= {f"mixture {seed}": any_mixture(seed) for seed in range(3)}
    for name, choose in choices.items():
        plan = plan_of(trace, choose)
        computed, outcome = enforced(loop, plan, tmp_path, STEPS)
        assert computed == plain, f"{name}: {outcome}"
        if loop is not moving_threshold:  # whose ops get other numbers in each iteration
            assert outcome.actions.skipped == 0, f"{name}: {outcome}"
        total += outcome.actions.done
    assert total > 0, "no plan did anything"
