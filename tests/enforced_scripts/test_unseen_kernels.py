"""Kernels that no mode sees write in place: what they touched is never made again from what was recorded before."""

from __future__ import annotations

import ctypes
import importlib
import sys

import pytest
import torch
from torch import nn

from memopt.instrument.nodes import is_torchs_own
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded, state_digests


def double_unseen(tensor: torch.Tensor) -> None:
    """As an extension's kernel would: no op, no version."""
    floats = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    for place in range(tensor.numel()):
        floats[place] *= 2.0


class WritesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        double_unseen(x)
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x


def _loop(steps):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    digests = []
    for _ in range(steps):
        loss = WritesItsInput.apply(model(torch.randn(32, 64)) * 1.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        digests += state_digests(model)
    return digests


def test_what_a_function_of_the_script_saved_is_not_computed_again(tmp_path):
    plain = seeded(_loop, 4)
    plan = plan_of(recorded(_loop, tmp_path), everything("recompute"))
    computed, outcome = enforced(_loop, plan, tmp_path, 4)
    assert computed == plain
    assert outcome.actions.done > 0  # the rest of the model is


def test_own_nodes_are_torchs():
    x = torch.randn(3, 3, requires_grad=True)
    assert is_torchs_own(x.tanh().grad_fn)
    assert not is_torchs_own(WritesItsInput.apply(x * 1.0).grad_fn)
    y = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True)
    assert is_torchs_own(y.grad_fn)


TRITON = """
class JITFunction:
    def __init__(self, fn):
        self.fn = fn

    def run(self, *args, grid=None, warmup=False, **kwargs):
        self.fn(*args)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """`launch(kernel, *tensors)` through a module that has Triton's name and form."""
    package = tmp_path / "packages" / "triton" / "runtime"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "jit.py").write_text(TRITON)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()

    def launched(kernel, *tensors):
        jit = importlib.import_module("triton.runtime.jit")
        jit.JITFunction(kernel).run(*tensors, grid=(1,))

    yield launched
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        del sys.modules[name]


def test_what_a_triton_kernel_gets_is_not_computed_again(tmp_path, launch):
    def loss_of(hidden):
        squared = hidden.tanh().square()
        launch(double_unseen, hidden.detach())  # after tanh has read it
        return squared.sum() + hidden.square().sum()

    def loop(steps):
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        digests = []
        for _ in range(steps):
            loss = loss_of(model(torch.randn(32, 64)) * 1.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            digests += state_digests(model)
        return digests

    plain = seeded(loop, 4)
    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    computed, outcome = enforced(loop, plan, tmp_path, 4)
    assert computed == plain
    assert outcome.actions.done > 0
