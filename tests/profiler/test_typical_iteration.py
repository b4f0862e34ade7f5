"""Which iteration a profile is of, where they differ in size: the third, unless it is the last, smaller batch of a small dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt.device import Device
from memopt.instrument.script.command import Command
from memopt.instrument.script.runner import StopScript
from memopt.profiler import recordings
from memopt.profiler.recordings import Wanted
from memopt.profiler.session import ProfileSession
from memopt.profiler.timing import bandwidth
from memopt.trace import Trace

EPOCH = (64, 64, 24)
"""Batch sizes."""


def profiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, batches: Sequence[int], **wanted: Any
) -> tuple[Trace, int]:
    """The profile of a training with these batches, and how many of them there were until it stopped."""
    monkeypatch.setattr(bandwidth, "measure_device", lambda kind, *_: Device(kind=kind, name="pretended"))
    script = folder / "loop.py"
    script.write_text("# run in process\n")
    session = ProfileSession(Command((str(script),)), Wanted(swap_dir=folder, **wanted))
    session.install()
    model, trained = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)), 0
    optimizer = torch.optim.AdamW(model.parameters())
    with contextlib.suppress(StopScript):
        for size in batches:
            loss = model(torch.randn(size, 256)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trained += 1
    trace = session.finished()
    assert trace is not None
    return trace, trained


def made_bytes(batch: int) -> int:
    """Of the hidden layer's activations."""
    return 4 * 256 * batch


@pytest.mark.parametrize(
    ("batches", "wanted", "iteration", "batch"),
    [
        (3 * EPOCH, {"chooses": 1}, 5, 64),
        (3 * EPOCH, {}, 3, 24),
        ((64, 64, 64, 24, 64, 64), {"chooses": 1}, 3, 64),
        ((64, 64, 56, 64, 64, 64), {"chooses": 1}, 3, 56),  # hardly less
        ((64, 64, 24), {"chooses": 1}, 3, 24),  # there is no other
        ((64, 64, 24, 64), {"chooses": 1}, 3, 24),
        ((64, 64, 24, 64, 16, 64, 64), {"chooses": 1}, 3, 24),  # the larger of the two, and no third
        ((24, 64, 64, 24), {"chooses": 1, "warmup": 0, "saved_before": 10**6}, 3, 64),
        ((24, 64, 64, 24), {"chooses": 1, "warmup": 0, "saved_before": 10}, 1, 24),
        ((24, 64, 16, 64, 56), {"chooses": 3, "warmup": 0, "saved_before": 10**6}, 5, 56),
        ((24, 64, 16, 64), {"chooses": 3, "warmup": 0, "saved_before": 10**6}, 1, 24),
    ],
)  # fmt: skip
def test_an_iteration_that_saves_much_less_than_the_one_before_is_not_the_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batches: tuple[int, ...],
    wanted: dict[str, Any],
    iteration: int,
    batch: int,
) -> None:
    trace, _ = profiled(tmp_path, monkeypatch, batches, **wanted)
    assert not trace.partial
    assert trace.iteration == iteration
    assert made_bytes(batch) in trace.storages.size_bytes
    if batch != max(EPOCH):
        assert made_bytes(max(EPOCH)) not in trace.storages.size_bytes


def test_a_profile_tells_that_the_third_iteration_was_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "iteration 3 saved 40 % of what the one before it saved for backward: another was recorded, if the script went on"
    assert profiled(tmp_path, monkeypatch, 3 * EPOCH, chooses=1)[0].notes == [note]
    assert profiled(tmp_path, monkeypatch, 3 * EPOCH)[0].notes == []


def test_ranks_record_the_same_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one would wait for another that has stopped."""
    monkeypatch.setattr(recordings, "has_peers", lambda: True)
    trace, _ = profiled(tmp_path, monkeypatch, 2 * EPOCH, chooses=1)
    assert trace.iteration == 3


def test_the_script_stops_once_the_larger_one_is_recorded_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = profiled(tmp_path, monkeypatch, 20 * (64,), chooses=1)[1]
    assert profiled(tmp_path, monkeypatch, 20 * EPOCH, chooses=1)[1] <= few + 2 < 20
