"""What a script does between ops is part of its plain step, also where no plain iteration could be timed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memopt.profiler.timing import between_ops
from memopt.profiler.trace_of import _step_ms


def test_only_the_scripts_own_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**9
    monkeypatch.setattr(between_ops, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns))
    between = between_ops.BetweenOps()
    now_ns += 100_000_000
    between.stop()
    assert between.total_ms == 0, "nothing had begun"
    between.go_on()
    now_ns += 50_000_000
    with between.left_out():
        now_ns += 500_000_000
    now_ns += 50_000
    between.stop()
    between.stop()
    assert between.total_ms == 49.9, "of each gap, 100 µs are memopt's"


def test_a_step_that_could_not_be_timed_is_its_ops_and_what_lies_between_them() -> None:
    """Both iterations of a run that asks for a share of the peak are recorded."""
    recorder = SimpleNamespace(sends_away=False, between=SimpleNamespace(total_ms=200.0))
    result = SimpleNamespace(recorder=recorder, usage=SimpleNamespace(time_us=[3000, 4000]))
    run = SimpleNamespace(plain=SimpleNamespace(timed=0))
    assert _step_ms(result, 500.0, run) == 207  # type: ignore[arg-type]
    assert _step_ms(result, 150.0, run) == 150, "recording only slows down"  # type: ignore[arg-type]
