"""The CUDA allocator's statistics, on a pretended allocator: ours and the script's peaks do not disturb one another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memopt.instrument.memory import cuda_statistics
from memopt.instrument.memory.cuda_statistics import statistics_of
from memopt.instrument.memory.meter import CudaMeter
from memopt.profiler.timing import clock as clocks
from memopt.profiler.timing.clock import CudaClock

MIB = 1 << 20


class Allocator:
    """Counts as c10's caching allocator does: current and peak, rounded to 512 and as asked for."""

    def __init__(self):
        self.asked = self.asked_peak = self.rounded = self.rounded_peak = 0

    def take(self, nbytes):
        self.asked += nbytes
        self.rounded += -(-nbytes // 512) * 512
        self.asked_peak, self.rounded_peak = (
            max(self.asked_peak, self.asked),
            max(self.rounded_peak, self.rounded),
        )

    def give(self, nbytes):
        self.asked -= nbytes
        self.rounded -= -(-nbytes // 512) * 512

    def statistics(self, index):
        return {
            "requested_bytes": {"all": {"current": self.asked, "peak": self.asked_peak}},
            "allocated_bytes": {"all": {"current": self.rounded, "peak": self.rounded_peak}},
            "reserved_bytes": {"all": {"current": 2 * MIB, "peak": 2 * MIB}},
            "num_ooms": 0,
        }

    def reset(self, index):
        self.asked_peak, self.rounded_peak = self.asked, self.rounded


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self, stream):
        pass

    def elapsed_time(self, end):
        return 0.25


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator()
    monkeypatch.setattr(cuda_statistics, "cuda_memory_stats", found.statistics)
    monkeypatch.setattr(cuda_statistics, "cuda_reset_peaks", found.reset)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", found.statistics, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", found.reset, raising=False)
    stream = SimpleNamespace(query=lambda: False)
    for name, value in {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "is_initialized", lambda: True, raising=False)
    monkeypatch.setattr(memory, "_get_device_index", lambda device=None, optional=False: 0)
    monkeypatch.setattr(cuda_statistics, "cuda_device_index", lambda device=None, optional=False: 0)
    for module, name in (
        (memory, "memory_stats_as_nested_dict"),
        (memory, "reset_peak_memory_stats"),
        (torch.cuda, "reset_peak_memory_stats"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back what statistics_of replaces
    statistics_of.cache_clear()
    yield found
    statistics_of.cache_clear()


def test_the_script_is_told_its_own_peak(allocator):
    allocator.take(1000)
    ours = statistics_of(0)
    allocator.take(5 * MIB)
    allocator.give(5 * MIB)
    ours.reset()
    allocator.take(MIB)
    assert ours.bytes_now() == (1000 + MIB, 1000 + MIB)
    assert torch.cuda.max_memory_allocated() == 1024 + 5 * MIB


def test_the_scripts_own_reset_does_not_lose_our_peak(allocator):
    ours = statistics_of(0)
    ours.reset()
    allocator.take(3 * MIB)
    allocator.give(3 * MIB)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    allocator.take(MIB)
    assert ours.bytes_now() == (MIB, 3 * MIB)
    assert torch.cuda.max_memory_allocated() == MIB


def test_a_meter_measures_what_was_asked_for(allocator):
    allocator.take(700)
    meter = CudaMeter()
    meter.start()
    allocator.take(100)
    allocator.give(100)
    assert (meter.base_bytes, meter.stop()) == (700, 800)


def test_a_clock_tells_what_each_op_holds_and_what_was_there_before(allocator):
    allocator.take(32 * MIB)  # a workspace of cuBLAS
    clock = CudaClock(0)
    clock.start()
    assert clock.base_bytes == 32 * MIB

    def op(inside, kept):
        allocator.take(inside)
        allocator.give(inside)
        allocator.take(kept)

    clock.run(0, op, (300, 100), {})
    allocator.take(1000)  # between two ops
    allocator.give(1000)
    clock.run(1, op, (50, 10), {})
    usage = clock.stop()
    assert usage.live_bytes == [0, 100]
    assert usage.inside_bytes == [300, 150]
    assert usage.high_bytes == [300, 1100]
    assert (usage.end_bytes, usage.time_us) == (110, [250.0, 250.0])


def test_the_gpu_is_kept_busy_while_an_op_is_launched(allocator, monkeypatch):
    slept = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(query=lambda: not slept)
    )
    monkeypatch.setattr(clocks, "cuda_sleep", slept.append)
    clock = CudaClock(0)
    clock.start()
    clock.run(0, lambda: None, (), {})
    clock.run(1, lambda: None, (), {})
    assert len(slept) == 1  # the second op finds work queued
