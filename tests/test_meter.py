"""What a meter takes for memory at its start: the storages that have bytes, each once."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from memopt.instrument.meter import living_storages


class Wrapper(Tensor):
    """As DTensor: shapes of its own, the bytes are another tensor's."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Child(Tensor):
    """A subclass whose bytes are its own."""


def _bytes_alive() -> int:
    gc.collect()
    return sum(storage.nbytes() for storage in living_storages("cpu"))


def test_wrappers_have_no_bytes_of_their_own() -> None:
    before = _bytes_alive()
    inner = torch.zeros(1000)
    wrapper, child = Wrapper(inner), torch.zeros(30).as_subclass(Child)
    view = inner[3:]
    assert wrapper.untyped_storage().nbytes() == 4000
    assert _bytes_alive() - before == 4000 + 120
    assert _bytes_alive() - before == 4000 + 120, "looking once does not change what is found"
    del wrapper, child, view


def test_a_gradient_that_nobody_has_looked_at_counts() -> None:
    leaf = torch.ones(1000, requires_grad=True)
    before = _bytes_alive()
    leaf.mul(2).sum().backward()
    assert _bytes_alive() - before == 4000
    leaf.grad = None
    assert _bytes_alive() - before == 0
