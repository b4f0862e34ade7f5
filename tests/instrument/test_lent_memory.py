"""Whose bytes a storage shows: torch's own, or somebody else's who may write them unseen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from memopt.instrument.ops import is_lent, is_shared


def on_gpu(*, resizable: bool) -> Any:
    """A CUDA storage as torch shows it: `is_shared` is always true there."""
    return SimpleNamespace(
        device=torch.device("cuda", 0), resizable=lambda: resizable, is_shared=lambda: True
    )


def test_memory_that_came_to_a_gpu_through_dlpack_is_lent() -> None:
    assert is_lent(on_gpu(resizable=False))
    assert not is_lent(on_gpu(resizable=True))
    assert not is_shared(on_gpu(resizable=True))


@pytest.mark.parametrize("lend", [torch.from_numpy, torch.from_dlpack])
def test_numpys_memory_is_lent(lend: Any) -> None:
    assert is_lent(lend(numpy.ones(4)).untyped_storage())


def test_what_a_loaders_worker_shares_is_not_lent() -> None:
    tensor = torch.ones(4)
    assert not is_lent(tensor.untyped_storage())
    shared = tensor.share_memory_().untyped_storage()
    assert is_shared(shared)
    assert not is_lent(shared)
