"""What the profiler does on a GPU alone, with a `torch.cuda` that answers as one would."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memopt.cli.run import budget
from memopt.cli.run.course import Wishes
from memopt.device import Device
from memopt.instrument.iterations import Iterations
from memopt.instrument.memory import cuda_statistics
from memopt.profiler import out_of_memory
from memopt.profiler.recordings import Recordings, Wanted
from memopt.profiler.timing import bandwidth, clock
from memopt.trace import CATEGORIES
from tests.support.enforced import recorded

GIB, MIB = 1 << 30, 1 << 20
SIZES = [512 * MIB, 64 * MIB, 4 * MIB]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The second of two GPUs is the current one."""
    properties = SimpleNamespace(name="Played 9000", total_memory=80 * GIB, uuid="0000")
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "get_device_name": lambda index=None: properties.name,
        "get_device_properties": lambda index: properties,
        "memory_reserved": lambda index: 3 * GIB,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    return properties


def test_a_gpu_is_described_by_what_the_driver_and_the_copies_say(
    gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(bandwidth, "measure_disk", lambda folder: (1e9, 2e9))
    monkeypatch.setattr(bandwidth, "_host_rates", lambda device, sizes: asked.append(device) or (50e9, 55e9))
    monkeypatch.setattr(bandwidth, "_copy_rate", lambda device, sizes: asked.append(device) or 1.5e12)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda_statistics, "process_bytes", lambda index: 4 * GIB if index == 1 else 0)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    device = bandwidth.measure_device("cuda", tmp_path)
    assert (device.name, device.memory_bytes, device.context_bytes) == ("Played 9000", 80 * GIB, GIB)
    assert (device.host_out_bytes_per_s, device.host_in_bytes_per_s) == (50e9, 55e9)
    assert device.copy_bytes_per_s == 1.5e12
    assert device.allocator == "expandable_segments:True"
    assert {str(each) for each in asked} == {"cuda:1"}


def test_a_driver_that_counts_less_than_the_allocator_leaves_no_context_below_zero(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda_statistics, "process_bytes", lambda index: 0)
    assert cuda_statistics.beside_allocator_bytes() == 0


def test_where_memory_has_run_out_a_smaller_copy_is_measured(gpu: SimpleNamespace) -> None:
    tried: list[int] = []

    def pair(size_bytes: int) -> Any:
        tried.append(size_bytes)
        if size_bytes > 100 * 2**20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: None

    assert bandwidth._rate(pair, torch.device("cuda", 1), SIZES) > 0
    assert tried == [512 * 2**20, 64 * 2**20]

    def never(size_bytes: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert bandwidth._rate(never, torch.device("cuda", 1), SIZES) == 0.0
    with pytest.raises(RuntimeError):
        bandwidth._rate(never, torch.device("cpu"), SIZES)


@pytest.mark.parametrize(
    ("room_bytes", "largest"), [(None, 64 * MIB), (128 * MIB, 64 * MIB), (100 * MIB, 16 * MIB), (0, 4 * MIB)]
)
def test_copies_are_measured_within_the_memory_that_the_script_takes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int | None, largest: int
) -> None:
    monkeypatch.setattr(bandwidth, "measure_disk", lambda folder: (1e9, 2e9))
    monkeypatch.setattr(bandwidth, "_rate", lambda pair, device, sizes_bytes: float(sizes_bytes[0]))
    assert bandwidth.measure_device("cpu", tmp_path, room_bytes).copy_bytes_per_s == largest


def test_a_copy_is_as_large_as_it_says_whatever_data_type_the_script_has_made_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script in double precision had twice as much copied as there was room for."""
    monkeypatch.setattr(bandwidth, "_rate", lambda pair, device, sizes_bytes: pair(sizes_bytes[0])().nbytes)
    torch.set_default_dtype(torch.float64)
    try:
        assert bandwidth._copy_rate(torch.device("cpu"), [MIB]) == MIB
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_profile_of_the_moment_names_the_gpu(gpu: SimpleNamespace) -> None:
    device = out_of_memory._device("cuda")
    assert (device.kind, device.name, device.memory_bytes) == ("cuda", "Played 9000", 80 * GIB)


def test_a_gpus_iteration_is_timed_and_counted_on_the_current_gpu(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(clock, "CudaClock", lambda index: made.append(index) or "of the gpu")
    recordings = Recordings(Wanted(device="cuda"), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert recordings._clock(with_bytes=True) == "of the gpu"
    assert made == [1]
    first = Recordings(Wanted(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert isinstance(first._clock(with_bytes=False), clock.TimeOnly)


def test_what_the_allocator_holds_beside_tensors_is_there_before_the_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workspaces of cuBLAS, buckets of DDP: without them a run seems to have kept something since it was profiled."""

    def loop(steps: int) -> list[str]:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        return []

    monkeypatch.setattr(clock.CpuClock, "base_bytes", 3 * GIB)
    trace = recorded(loop, tmp_path)
    assert trace.base_bytes == 3 * GIB
    rows = zip(trace.storages.size_bytes, trace.storages.category, trace.storages.birth_op, strict=True)
    before = [(size, CATEGORIES[category]) for size, category, birth in rows if birth < 0]
    assert sum(size for size, _ in before) == 3 * GIB
    state = sum(size for size, category in before if category != "workspace")
    assert [size for size, category in before if category == "workspace"] == [3 * GIB - state]
    assert state >= 2 * 4 * (8 * 8 + 8), "parameters and gradients"


def test_an_iteration_is_over_when_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead where a loop asks for no value: its own clock tells when an iteration was launched."""
    waited: list[int] = []
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(loop.count))
    loop = Iterations(SimpleNamespace(iteration_ended=lambda count, milliseconds: None))  # type: ignore[arg-type]
    for _ in range(3):
        loop._end_iteration()
    capturing[0] = True
    loop._end_iteration()
    assert waited == [0, 1, 2]
    assert loop.count == 4


def test_the_driver_is_asked_for_the_device_by_its_uuid(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CUDA_VISIBLE_DEVICES` numbers the GPUs anew, and a MIG slice has no number."""
    mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * GIB)
    another = SimpleNamespace(pid=1, usedGpuMemory=GIB)
    told = {"GPU-0000": [another, mine]}
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: told[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert cuda_statistics.process_bytes(1) == 5 * GIB
    told["GPU-0000"] = [another]
    assert cuda_statistics.process_bytes(1) == 0
    told.clear()
    assert cuda_statistics.process_bytes(1) == 0, "what the driver does not know is not told"


@pytest.mark.parametrize(("name", "free", "holds"), [("Played 9000", 9, True), ("Another", 9, False), ("Played 9000", 4, False)])  # fmt: skip
def test_a_plan_of_the_run_before_is_for_this_gpu_and_what_it_has_free(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, free: int, holds: bool
) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda kind: free * GIB)
    plan = SimpleNamespace(device=Device(kind="cuda", name=name), predicted_peak_bytes=5 * GIB)
    wishes = Wishes(budget=None, device="", swap_dir=Path())
    assert budget.still_holds(plan, wishes) is holds  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert budget.still_holds(plan, wishes) is False  # type: ignore[arg-type]
