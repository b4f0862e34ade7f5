"""Bytes typed as a budget for a GPU are those that nvidia-smi shows: the context and the allocator's gaps come off first."""

from __future__ import annotations

import io
from types import SimpleNamespace

import msgspec
import pytest
import torch
from rich.console import Console

from memopt.device import Device
from memopt.enforcers.measurements import Measurements
from memopt.enforcers.memory_limit import MemoryLimit, limit_of
from memopt.enforcers.session import ApplySession, Options
from memopt.errors import BudgetInfeasible, NotPossibleHere
from memopt.estimators.elsewhere.from_profile import estimate_trace
from memopt.estimators.hidden.beside_tensors import beside_tensors, parse_budget
from memopt.instrument import torch_internals
from memopt.instrument.memory import cuda_statistics
from memopt.outcome import ActionCounts, Outcome
from memopt.plan import Plan
from memopt.reports.outcome import render_outcome
from tests.support.toy_trace import toy_trace

MIB = 1 << 20
A100 = Device(kind="cuda", name="NVIDIA A100-SXM4-40GB", context_bytes=500 * MIB, allocator="native")


def test_on_a_cpu_a_budget_is_of_tensors():
    budget = parse_budget("1GiB", toy_trace(), unplanned_bytes=1)
    assert (budget.tensors_bytes, budget.whole_bytes, budget.notes) == (1 << 30, 0, ())


def test_on_a_gpu_the_context_and_the_allocator_come_off():
    trace = toy_trace(device=A100)
    beside = beside_tensors(trace)
    assert beside.context_bytes == 500 * MIB
    smallest = estimate_trace(trace).smallest_bytes
    assert beside.allocator_bytes == smallest - trace.peak_bytes >= 0
    budget = parse_budget("1GiB", trace, unplanned_bytes=1)
    assert budget.tensors_bytes == (1 << 30) - beside.total_bytes
    assert budget.whole_bytes == 1 << 30
    assert "500 MiB go to the CUDA context" in budget.notes[0]


def test_a_share_is_of_the_tensors_own_peak_everywhere():
    budget = parse_budget("60%", toy_trace(device=A100), unplanned_bytes=1000)
    assert (budget.tensors_bytes, budget.whole_bytes) == (600, 0)


def test_a_gpu_that_no_table_knows_still_has_its_context():
    trace = msgspec.structs.replace(toy_trace(), device=Device(kind="cuda", name="Quantum 9000", context_bytes=MIB))  # fmt: skip
    assert beside_tensors(trace).total_bytes == MIB


def test_a_refusal_tells_bytes_of_the_process():
    budget = parse_budget("600MiB", toy_trace(device=A100), unplanned_bytes=1)
    told = budget.told(BudgetInfeasible(budget.tensors_bytes, 300 * MIB, ("why",)))
    assert told.budget_bytes == 600 * MIB
    assert told.min_peak_bytes == 300 * MIB + budget.beside.total_bytes
    assert told.blockers[0] == "why"
    with pytest.raises(BudgetInfeasible, match="600 MiB cannot be met"):
        raise told


def _plan(device: Device, whole_bytes: int) -> Plan:
    trace = toy_trace(device=device)
    return Plan(
        memopt="", created="", script=trace.script, device=device, profile="", strategy="", budget_bytes=1, unplanned_peak_bytes=1,
        predicted_peak_bytes=1, plain_step_ms=1.0, predicted_step_ms=1.0, actions=[], script_actions=[], notes=[], whole_budget_bytes=whole_bytes,
    )  # fmt: skip


@pytest.fixture
def gpus(monkeypatch):
    """Of 4000 MiB each. `told`: what share of which has been allowed; torch leaves the last of them as the current one."""
    here = SimpleNamespace(count=2, current=1, initialized=False, told=[], waiting=[])

    def limit(share, index):
        here.told.append((share, index))
        here.current = index

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, here.current = here.current, self.index

        def __exit__(self, *_):
            here.current = self.before

    monkeypatch.setattr(torch_internals, "cuda_lazy_call", here.waiting.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here.count)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: here.initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here.current)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=4000 * MIB))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    return here


def test_a_held_run_may_reserve_the_budget_less_the_context(gpus):
    limit_bytes = limit_of(_plan(A100, 1500 * MIB))
    assert limit_bytes == 1000 * MIB
    gpus.count = 1
    limit = MemoryLimit(limit_bytes)
    limit.begin()
    limit.training_begins()
    assert gpus.told == []  # no context before the script wants one
    gpus.waiting[0]()
    assert gpus.told == [(0.25, 0)]
    gpus.initialized = True
    limit.training_begins()
    assert gpus.told == [(0.25, 0)]


def test_of_several_gpus_the_one_that_a_rank_trains_on_is_limited_and_stays_the_current_one(gpus):
    limit = MemoryLimit(1000 * MIB)
    limit.begin()
    gpus.waiting[0]()
    assert gpus.told == [], "its device is not set yet, and another's context would take its memory"
    gpus.initialized = True
    for _ in range(2):
        limit.training_begins()
    assert (gpus.told, gpus.current) == ([(0.25, 1)], 1)
    limit._hold(0)
    assert gpus.current == 1


def test_a_run_that_is_to_be_held_is(monkeypatch, tmp_path):
    heard = []
    for name in ("begin", "training_begins"):
        monkeypatch.setattr(
            MemoryLimit, name, lambda self, name=name: heard.append((name, self._limit_bytes))
        )
    session = ApplySession(_plan(Device(kind="cpu"), 0), Options(swap_dir=tmp_path, measure=False, limit_bytes=1000 * MIB))  # fmt: skip
    session.install()
    try:
        weight = torch.ones(2, requires_grad=True)
        weight.sum().backward()
    finally:
        session.finished()
    assert heard == [("begin", 1000 * MIB), ("training_begins", 1000 * MIB)]


def test_a_run_that_is_not_is_not(gpus):
    limit = MemoryLimit(0)
    limit.begin()
    gpus.initialized = True
    limit.training_begins()
    assert gpus.told == gpus.waiting == []


def test_allocated_reserved_and_process_are_told_beside_each_other(monkeypatch):
    statistics = SimpleNamespace(peaks_of_the_script=lambda: (700 * MIB, 900 * MIB))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda_statistics, "statistics_of", lambda index: statistics if index == 1 else None)
    monkeypatch.setattr(cuda_statistics, "process_bytes", lambda index: 1400 * MIB if index == 1 else 0)
    found = Measurements(_plan(A100, 1500 * MIB), peaks=True).on_the_gpu()
    outcome = Outcome(
        budget_bytes=1500 * MIB, unplanned_peak_bytes=1, predicted_peak_bytes=1, measured_peak_bytes=1, plain_step_ms=1.0,
        predicted_step_ms=1.0, measured_step_ms=1.0, actions=ActionCounts(planned=0, done=0, skipped=0), divergences=0, steps=3, notes=[], **found,
    )  # fmt: skip
    console = Console(width=200, file=io.StringIO())
    console.print(render_outcome(outcome))
    said = "at most 700 MiB were allocated and 900 MiB reserved; the process holds 1.37 GiB, its CUDA context included"
    assert said in console.file.getvalue()
    assert Measurements(_plan(Device(kind="cpu"), 0), peaks=True).on_the_gpu() == {}


def test_what_cannot_be_held_is_refused():
    with pytest.raises(NotPossibleHere, match="for a GPU"):
        limit_of(_plan(Device(kind="cpu"), 1500 * MIB))
    with pytest.raises(NotPossibleHere, match="cannot be held"):
        limit_of(_plan(A100, 0))
