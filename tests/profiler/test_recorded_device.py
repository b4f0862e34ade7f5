"""Which device a profile is of: the one that is found when the recording ends, unless somebody has named one.

There is no GPU here. The CPU's tensors stand for what was on the host, and a `torch` that has used CUDA for the rest.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from memopt.device import Device
from memopt.instrument.script.command import Command
from memopt.instrument.script.runner import StopScript
from memopt.profiler import known, recordings
from memopt.profiler.recordings import Wanted
from memopt.profiler.session import ProfileSession
from memopt.profiler.timing import bandwidth
from memopt.trace import Trace


def profiled(folder: Path, monkeypatch: pytest.MonkeyPatch, *, dies: bool, wanted: str = "") -> Trace:
    """A model that lies on the CPU, and on the GPU from its first forward on."""
    moved: list[bool] = []
    monkeypatch.setattr(known, "device_in_use", lambda modules=None: "cuda" if any(moved) else "cpu")
    monkeypatch.setattr(bandwidth, "measure_device", lambda kind, *_: Device(kind=kind, name="pretended"))
    script = folder / "loop.py"
    script.write_text("# run in process\n")
    session = ProfileSession(Command((str(script),)), Wanted(swap_dir=folder, device=wanted))
    session.install()
    with contextlib.suppress(StopScript):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        loss = model(torch.randn(8, 64)).sum()
        moved.append(not dies)
        try:
            if dies:
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        except torch.OutOfMemoryError as error:
            session.ended_by(error)
    trace = session.finished()
    assert trace is not None
    return trace


def test_what_runs_out_of_a_gpus_memory_in_the_first_iteration_is_profiled_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "_uses_cuda", lambda: True)
    trace = profiled(tmp_path, monkeypatch, dies=True)
    assert trace.device.kind == "cuda"
    assert trace.op_count > 0
    assert sum(trace.storages.size_bytes) == trace.base_bytes == 0, "what lies on the host is no GPU's memory"


def test_a_model_that_moves_in_its_first_iteration_is_profiled_where_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = profiled(tmp_path, monkeypatch, dies=False)
    assert (trace.device.kind, trace.base_bytes) == ("cuda", 0)


def test_a_device_that_was_named_is_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_uses_cuda", lambda: True)
    trace = profiled(tmp_path, monkeypatch, dies=True, wanted="cpu")
    assert trace.device.kind == "cpu"
    assert trace.base_bytes == 4 * (64 * 64 + 64 + 8 * 64), "the model and its input"
