"""FSDP2 on fake tensors: what a rank keeps, what it gathers, and what it gives back."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.estimators.estimate import Estimate, estimate_script

WEIGHT = 4 * 1024 * 1024
SCRIPT = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
os.environ.update(RANK="0", WORLD_SIZE="{ranks}", MASTER_ADDR="localhost", MASTER_PORT="29599")
dist.init_process_group("gloo" if "{device}" == "cpu" else "nccl")
mesh = torch.distributed.device_mesh.init_device_mesh("{device}", ({ranks},))
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)]).to("{device}")
for layer in model: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(4):
    model(torch.randn(8, 1024, device="{device}")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def estimated(folder: Path, device: str, ranks: int) -> Estimate:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(device=device, ranks=ranks))
    return estimate_script([str(script)], device="cpu" if device == "cpu" else "a100-40gb")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_keeps_its_share_and_gathers_a_layer_or_two_at_a_time(tmp_path: Path, device: str) -> None:
    """Parameters, gradients and momenta of a rank; of two layers besides what is gathered, of one the gradient."""
    alone, one_of_four = (estimated(tmp_path, device, ranks) for ranks in (1, 4))
    assert alone.by_category["parameter"] >= 4 * WEIGHT
    assert alone.by_category["optimizer state"] == 4 * WEIGHT
    assert one_of_four.by_category["optimizer state"] == WEIGHT
    saved = alone.allocated_bytes - one_of_four.allocated_bytes
    assert 4 * WEIGHT < saved <= 9 * WEIGHT
