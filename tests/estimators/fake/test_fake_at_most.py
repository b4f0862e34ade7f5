"""What a mask selects at most, where known values rule out the rest: compared with the same lines on real tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from memopt.estimators.fake.recorder import FakeRecorder

LABELS = torch.arange(64) % 4
SAME = LABELS[:, None] == LABELS[None]


@pytest.fixture
def recorder() -> Iterator[FakeRecorder]:
    with FakeRecorder("cpu") as made:
        yield made


def selected(mask: torch.Tensor) -> int:
    return torch.where(mask)[0].numel()


def mined(distances: torch.Tensor, far: float) -> tuple[int, int]:
    """A miner's pairs: those of the same label, and those of others, that a sorted comparison leaves over."""
    positive, negative = distances.clone(), distances
    positive[torch.where(~SAME)] = -far
    negative[torch.where(SAME)] = far
    highest, lowest = positive.sort(dim=1)[0], negative.sort(dim=1)[0]
    return selected(highest + 9 > lowest[:, :1]), selected(lowest - 9 < highest[:, -1:])


@pytest.mark.parametrize("far", [math.inf, torch.finfo(torch.float32).max])
def test_pairs_over_which_infinity_was_written_are_not_mined(recorder: FakeRecorder, far: float) -> None:
    """Nine is more than two distances can differ by: on real tensors everything is mined that can be."""
    every = mined(torch.rand(64, 64), far)
    assert mined(recorder.fake((64, 64)), far) == every == (64 * 16, 64 * 48)
    assert recorder.guesser.bounded


def test_a_known_mask_bounds_what_it_is_combined_with(recorder: FakeRecorder) -> None:
    unknown = recorder.fake((64, 64)) > 0
    assert [
        selected(unknown & SAME),
        selected(torch.logical_and(SAME, unknown)),
        selected(unknown * SAME),
    ] == [1024] * 3
    assert selected((unknown & SAME) & (recorder.fake((64, 64)) > 0)) == 1024
    assert selected(unknown) == selected(unknown | SAME) == 4096


def test_a_masked_fill_by_a_known_mask_rules_out_what_it_covers(recorder: FakeRecorder) -> None:
    logits = recorder.fake((64, 64)).masked_fill(SAME, -math.inf)
    assert [selected(logits > 0), selected(logits.t() >= 0.5), selected(logits < 0)] == [3072, 3072, 4096]


def test_a_large_number_is_no_infinity_for_what_may_be_as_large(recorder: FakeRecorder) -> None:
    assert selected(recorder.fake((64, 64)).masked_fill(SAME, -100.0) > 0) == 4096


def test_nothing_is_known_any_more_of_what_was_written_over(recorder: FakeRecorder) -> None:
    logits = recorder.fake((64, 64)).masked_fill(SAME, -math.inf)
    logits.copy_(recorder.fake((64, 64)))
    assert selected(logits > 0) == 4096
