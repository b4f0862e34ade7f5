"""What a script does between ops is part of its plain step, also where no plain iteration could be timed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memopt.growth import saved_elements
from memopt.instrument.script.command import Command
from memopt.profiler.recorder import Recorder
from memopt.profiler.recordings import Wanted
from memopt.profiler.session import ProfileSession
from memopt.profiler.timing import between_ops
from memopt.profiler.timing.plain_steps import PlainSteps
from memopt.profiler.trace_of import _step_ms

HOOKS = ("_packed", "_asked_for")
"""Of the recorder's, what happens when a tensor is saved and when it is asked for."""


def _train(batches: Sequence[int] = (4, 4, 4, 4)) -> list[bool]:
    """Was each iteration recorded?"""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorded = []
    for batch in batches:
        loss = net(torch.randn(batch, 8)).square().mean()
        recorded.append(_get_current_dispatch_mode() is not None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return recorded


def _session(folder: Path, *, times_second: bool = False, chooses: bool = False) -> ProfileSession:
    script = folder / "loop.py"
    script.write_text("# run in process\n")
    wanted = Wanted(keep_running=True, chooses=chooses, times_second=times_second, swap_dir=folder)
    return ProfileSession(Command((str(script),)), wanted)


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
    """Where memory may be short, all iterations before the plan are recorded."""
    recorder = SimpleNamespace(sends_away=False, between=SimpleNamespace(total_ms=200.0))
    result = SimpleNamespace(
        recorder=recorder, usage=SimpleNamespace(time_us=[3000, 4000]), saved_elements=50
    )
    run = SimpleNamespace(plain=PlainSteps())
    saved: list[tuple[int, int]] = []

    def step_ms(recorded_ms: float) -> float:
        recordings = SimpleNamespace(recorded_ms=recorded_ms, saved_before=saved)
        return _step_ms(result, recordings, run)  # type: ignore[arg-type]

    assert step_ms(500.0) == 207
    assert step_ms(150.0) == 150, "recording only slows down"
    run.plain.add(300.0, waited_for=False)
    assert step_ms(500.0) == 207, "a single one may have been slow"
    for milliseconds in (230.0, 240.0):
        run.plain.add(milliseconds, waited_for=True)
    assert step_ms(500.0) == 235
    saved += [(1, 50), (1, 50), (1, 100)]
    assert step_ms(500.0) == 175, "the last one saved twice as much: 120 ms to as many elements, and 230 ms"
    saved[1:] = [(1, 40), (1, 40)]
    assert step_ms(500.0) == 207, "of those that saved less, none could take longer than the ops"
    result.usage.time_us.append(900_000)
    assert step_ms(2000.0) == 907, "those seen were of another kind"


@pytest.mark.parametrize("times_second", [True, False])
def test_the_second_iteration_is_timed_where_somebody_waits_for_the_third(
    times_second: bool, tmp_path: Path
) -> None:
    session = _session(tmp_path, times_second=times_second)
    session.install()
    try:
        recorded = _train((4, 8, 4, 4))
    finally:
        trace = session.finished()
    assert recorded == [True, not times_second, True, False]
    assert trace is not None
    assert trace.iteration == 3
    tensors, (saved, weights, again) = len(trace.slots.storage), saved_elements(trace)
    assert session.saved_before == ([(tensors, 2 * saved + weights + again)] if times_second else [])


def test_a_third_iteration_is_held_against_the_second_also_where_that_was_timed(tmp_path: Path) -> None:
    session = _session(tmp_path, times_second=True, chooses=True)
    session.install()
    try:
        recorded = _train((4, 16, 4, 16, 16, 16))
    finally:
        trace = session.finished()
    assert recorded == [True, False, True, False, True, False]
    assert trace is not None
    assert trace.iteration == 5


def test_what_the_recorders_hooks_take_is_not_the_scripts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a clock that goes on in them alone."""
    now_ns, made = 10**9, []
    monkeypatch.setattr(between_ops, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns))

    def slowly(hook: Any) -> Any:
        @functools.wraps(hook)
        def run(recorder: Recorder, *args: Any) -> Any:
            nonlocal now_ns
            now_ns += 10**9
            made.append(recorder)
            return hook(recorder, *args)

        return run

    for name in HOOKS:
        monkeypatch.setattr(Recorder, name, slowly(getattr(Recorder, name)))
    session = _session(tmp_path)
    session.install()
    try:
        _train()
    finally:
        session.finished()
    assert made
    assert {recorder.between.total_ms for recorder in made} == {0.0}
