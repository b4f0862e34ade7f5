"""Indexing by masks and positions on fake tensors: bytes beside the result, and one gradient where autograd makes one."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.recording import Recording

N = 100_000
FLOAT, POSITION = 4, 8


def picked(target: Literal["cpu", "cuda"], by: str) -> Recording:
    """A vector indexed `by` a mask of all its elements or by half as many positions, summed, and backward."""
    with FakeRecorder(target) as recorder:
        weight = recorder.parameter((N,))
        index = recorder.fake((N,), torch.bool) if by == "mask" else recorder.fake((N // 2,), torch.int64)
        (weight * 2)[index].sum().backward()
        return recorder.finish()


def born(recording: Recording, phase: str, op: str) -> list[int]:
    rows = [row for row in recording.rows if row.phase == phase and row.op.startswith(op)]
    return [row.size_bytes for row in rows if row.size_bytes]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_mask_becomes_positions_first(target: Literal["cpu", "cuda"]) -> None:
    assert born(picked(target, "mask"), "forward", "index.") == [N * FLOAT, N * POSITION]


@pytest.mark.parametrize("by", ["mask", "positions"])
def test_the_gradient_is_put_into_its_own_zeros(by: str) -> None:
    made = picked("cpu", by)
    assert born(made, "backward", "new_zeros") == [N * FLOAT]
    assert born(made, "backward", "index_put") == ([N * POSITION] if by == "mask" else [])


@pytest.mark.parametrize(("by", "count"), [("mask", N), ("positions", N // 2)])
def test_cuda_sorts_positions_to_add_at_them(by: str, count: int) -> None:
    """Linear, sorted and original indices, a range, and CUB's second keys and values."""
    assert born(picked("cuda", by), "backward", "index_put") == [6 * count * POSITION]


def test_one_number_under_a_mask_is_filled_in() -> None:
    with FakeRecorder("cpu") as recorder:
        x, mask = recorder.fake((N,)), recorder.fake((N,), torch.bool)
        x[mask] = 0.0
        assert not recorder.guesser.bounded, "no size depends on the mask"
        x[mask] = recorder.fake((N,))
        made = recorder.finish()
    assert born(made, "forward", "index_put") == [N * POSITION]
