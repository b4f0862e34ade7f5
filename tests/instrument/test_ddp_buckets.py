"""The buckets in which DistributedDataParallel reduces gradients count from the start of an iteration, in the profile and in the run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.enforcers.guarding.live_bytes import Live
from memopt.estimators.simulator.trace_view import TraceView
from memopt.estimators.simulator.weights_away import REASONS_TO_STAY
from memopt.instrument.memory.meter import CpuMeter
from tests.support.enforced import enforced, plan_of, recorded


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rebuilt", [True, False], ids=["rebuilt", "as they were"])
@pytest.mark.parametrize("view", [False, True], ids=["buckets", "gradients are views of them"])
def test_buckets_are_there_before_backward(view: bool, rebuilt: bool, alone: None, tmp_path: Path) -> None:
    layers, width = 4, 256
    weights = layers * width * (width + 1) * 4

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=view, find_unused_parameters=not rebuilt
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(64, width)).square().sum().backward()
            optimizer.step()
        return []

    trace = recorded(loop, tmp_path)
    sets = 2 if view else 3  # parameters and gradients, or also buckets
    assert sets * weights <= trace.base_bytes < (sets + 0.5) * weights
    assert sets * weights < trace.peak_bytes < (sets + 0.9) * weights
    _, outcome = enforced(loop, plan_of(trace, lambda problem: {}), tmp_path, 6, measure=True)
    assert outcome.measured_peak_bytes == pytest.approx(trace.peak_bytes, rel=0.02)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _held() -> int:
    meter = CpuMeter()
    meter.start()
    meter.stop()
    return meter.base_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("static", [False, True], ids=["", "static graph"])
def test_a_bucket_that_a_mode_has_seen_reduced_counts_once(static: bool, alone: None) -> None:
    gc.collect()
    before = _held()
    layers = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    model = nn.parallel.DistributedDataParallel(layers, static_graph=static)
    sets = 3 * 2 * 600 * 601 * 4  # parameters, gradients, buckets
    for watches in (True, False, True, True, False):
        model.zero_grad()
        with Watching() if watches else contextlib.nullcontext():
            model(torch.randn(4, 600)).sum().backward()
        assert _held() - before == pytest.approx(sets, abs=30_000)


@pytest.mark.filterwarnings("ignore")
def test_no_weight_is_planned_away_where_processes_train_together(alone: None, tmp_path: Path) -> None:
    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(64, 600)).square().sum().backward()
            optimizer.step()
        return []

    trace = recorded(loop, tmp_path)
    assert trace.facts["several_processes"] == 1
    together = trace.facts | dict.fromkeys(REASONS_TO_STAY, 0) | {"several_processes": 1}
    view = TraceView(msgspec.structs.replace(trace, facts=together))
    assert not any(each.is_weight for each in view.saved.values())
    alone_facts = trace.facts | dict.fromkeys(REASONS_TO_STAY, 0)  # tests before may have left threads behind
    view = TraceView(msgspec.structs.replace(trace, facts=alone_facts))
    assert any(each.is_weight for each in view.saved.values())


class Counting(TorchDispatchMode):
    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live.made(out)
        return out


@pytest.mark.filterwarnings("ignore")
def test_the_guard_counts_buckets_before_an_op_shows_them_and_once(alone: None) -> None:
    gc.collect()
    before = Live("cpu").look_around().now()
    model = nn.parallel.DistributedDataParallel(nn.Linear(300, 300))
    live = Live("cpu").look_around()
    weights = 300 * 301 * 4
    assert live.now() - before == pytest.approx(2 * weights, abs=20_000)
    with Counting(live):
        model(torch.randn(4, 300)).sum().backward()
    assert live.now() - before == pytest.approx(3 * weights, abs=20_000)
