"""The buckets in which DistributedDataParallel reduces gradients count from the start of an iteration, in the profile and in the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.enforced import enforced, plan_of, recorded


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", [False, True], ids=["buckets", "gradients are views of them"])
def test_buckets_are_there_before_backward(view: bool, alone: None, tmp_path: Path) -> None:
    layers, width = 4, 256
    weights = layers * width * (width + 1) * 4

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
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
