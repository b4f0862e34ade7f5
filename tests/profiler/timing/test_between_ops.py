"""What a script does between ops is part of its plain step, also where no plain iteration could be timed."""

from __future__ import annotations

import time
from types import SimpleNamespace

from memopt.profiler.timing.between_ops import BetweenOps
from memopt.profiler.trace_of import _step_ms


def test_only_the_scripts_own_time_counts() -> None:
    between = BetweenOps()
    time.sleep(0.1)  # nothing has begun
    assert between.total_ms == 0
    between.go_on()
    time.sleep(0.05)
    with between.left_out():
        time.sleep(0.5)
    between.stop()
    between.stop()
    assert 45 < between.total_ms < 500


def test_a_step_that_could_not_be_timed_is_its_ops_and_what_lies_between_them() -> None:
    """Both iterations of a run that asks for a share of the peak are recorded."""
    recorder = SimpleNamespace(sends_away=False, between=SimpleNamespace(total_ms=200.0))
    result = SimpleNamespace(recorder=recorder, usage=SimpleNamespace(time_us=[3000, 4000]))
    run = SimpleNamespace(plain=SimpleNamespace(timed=0))
    assert _step_ms(result, 500.0, run) == 207  # type: ignore[arg-type]
    assert _step_ms(result, 150.0, run) == 150, "recording only slows down"  # type: ignore[arg-type]
