"""Hooks beside torch.func, in which an iteration may end: nothing of memopt may be left on the stack that torch looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memopt.instrument.saved import SavedTensorHooks
from memopt.instrument.torch_internals import top_saved_hooks


def hooks() -> SavedTensorHooks:
    return SavedTensorHooks(lambda tensor: tensor, lambda handle: handle)


def square(x: Tensor, then: Callable[[], Any] = lambda: None) -> Tensor:
    then()
    return (x * x).sum()


def gradient(then: Callable[[], Any]) -> Tensor:
    found: Tensor = torch.func.grad(lambda x: square(x, then))(torch.arange(3.0))
    return found


def test_hooks_that_are_removed_within_a_transform_do_not_come_back_after_it() -> None:
    ours = hooks()
    assert ours.install()
    assert gradient(ours.remove).tolist() == [0, 2, 4]
    assert top_saved_hooks(True) is None
    assert gradient(lambda: None).tolist() == [0, 2, 4]
    assert ours.stepped_aside == 1


def test_none_are_installed_within_a_transform() -> None:
    ours = hooks()
    found: list[bool] = []
    assert gradient(lambda: found.append(ours.install())).tolist() == [0, 2, 4]
    assert found == [False]
    assert top_saved_hooks(True) is None
    assert ours.install()
    ours.remove()
    assert top_saved_hooks(True) is None


def test_others_take_their_place_within_a_transform() -> None:
    """As where one phase of `memopt run` follows another: the next one has no hooks there, and none of the last is left."""
    first, second = hooks(), hooks()
    assert first.install()

    def change() -> None:
        first.remove()
        second.install()

    gradient(change)
    assert top_saved_hooks(True) is None
    second.thread_changed()
    assert top_saved_hooks(True) is not None
    second.remove()
    assert top_saved_hooks(True) is None


@pytest.mark.memopt_fails
def test_a_hook_of_ours_that_fails_keeps_the_tensor_and_tells_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(tensor: Tensor) -> Any:
        raise NameError("a fault of memopt's")

    ours = SavedTensorHooks(fails, lambda handle: handle.get())
    weight = torch.ones(3, requires_grad=True)
    assert ours.install()
    try:
        ((weight * weight) * weight).sum().backward()
    finally:
        ours.remove()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3, 3]
    (record,) = caplog.records
    assert "is kept" in record.message
    assert record.exc_info
