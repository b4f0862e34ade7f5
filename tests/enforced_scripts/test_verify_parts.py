"""Digests of tensors that are made of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

from memopt.enforcers.verify.digests import digest


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_distributed_tensor_is_its_own_part() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    mesh = init_device_mesh("cpu", (1,))
    assert digest(distribute_tensor(whole, mesh, [Replicate()])) == digest(whole)
    changed = whole.clone()
    changed[1, 2] = 5.5
    assert digest(distribute_tensor(changed, mesh, [Replicate()])) != digest(whole)
