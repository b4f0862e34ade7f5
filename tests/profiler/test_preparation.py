"""What comes before training is neither slowed down nor forgotten."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memopt.enforcers.session import ApplySession, Options
from memopt.instrument.memory.outside import before_training, is_clearly_more, was_above_now_bytes
from memopt.instrument.script.command import Command
from memopt.profiler.recordings import Wanted
from memopt.profiler.session import ProfileSession
from memopt.trace import BEFORE_TRAINING
from tests.support.enforced import everything, plan_of, recorded
from tests.support.toy_trace import toy_trace

SLOWEST = 1 / 0.7


def _prepare() -> float:
    """A loop that fills tensors, as data sets are made: seconds."""
    data, begin = torch.zeros(40, 8), time.perf_counter()
    for row in range(40):
        for column in range(8):
            data[row, column] = torch.tensor(float(row)) * column
    return time.perf_counter() - begin


def _ratio(slow: object) -> float:
    """The least of several tries, of preparation under a session to plain preparation."""
    return min(slow() / _prepare() for _ in range(15))


def _train(steps: int) -> list[str]:
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(16, 8)).sum().backward()
        optimizer.step()
    return []


def test_preparation_runs_at_its_own_speed_under_profile(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("#")

    def under_profile() -> float:
        session = ProfileSession(Command((str(tmp_path / "s.py"),)), Wanted(swap_dir=tmp_path))
        session.install()
        try:
            assert _get_current_dispatch_mode() is None
            return _prepare()
        finally:
            session.finished()

    assert _ratio(under_profile) < SLOWEST


def test_preparation_runs_at_its_own_speed_under_a_plan(tmp_path: Path) -> None:
    plan = plan_of(recorded(_train, tmp_path), everything("recompute"))
    assert plan.actions

    def under_plan() -> float:
        session = ApplySession(plan, Options(swap_dir=tmp_path, measure=False))
        session.install()
        try:
            return _prepare()
        finally:
            session.finished()

    assert _ratio(under_plan) < SLOWEST


def test_what_was_held_before_is_the_highest_resident_set(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmPeak:\t 9 kB\nVmHWM:\t  500 kB\nVmRSS:\t  200 kB\n")
    assert was_above_now_bytes("cpu", status) == 300 * 1024
    assert was_above_now_bytes("cpu", tmp_path / "missing") == 0


def test_a_larger_peak_before_training_is_told_in_the_profile() -> None:
    import msgspec

    trace = toy_trace()
    assert before_training(trace, trace.peak_bytes) == ""
    held = msgspec.structs.replace(trace, facts={BEFORE_TRAINING: 10**9})
    assert "at least 954 MiB were held" in before_training(held, trace.peak_bytes)
    assert not is_clearly_more(10**9 + 10**6, 10**9)
