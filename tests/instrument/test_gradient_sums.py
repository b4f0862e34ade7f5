"""Gradients that meet on their way are added in place by a plain run, though not while a mode watches: the peak is the plain run's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from memopt.trace import Trace
from tests.support.enforced import Loop, enforced, plan_of, recorded, seeded

WIDE = 1 << 18
"""Elements of the weight; its gradients are the peak."""


class Twice(torch.autograd.Function):
    """A backward that adds by itself, and needs what it adds afterwards."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return (grad + grad.flip(0)) * grad


def loop_of(loss_of) -> Loop:
    def loop(steps: int) -> list[str]:
        weight = torch.nn.Parameter(torch.randn(WIDE))
        optimizer = torch.optim.SGD([weight], 0.1)
        losses = []
        for _ in range(steps):
            loss = loss_of(weight)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        return losses

    return loop


def tied(weight: Tensor) -> Tensor:
    """Three gradients of the weight meet."""
    return weight.sum() * 0.1 + (weight * 0.5).sum() + weight.abs().sum()


def joined(weight: Tensor) -> Tensor:
    """Two meet, and those are made of a third by two nodes."""
    hidden = weight.sin()
    return (hidden.cos() + hidden.tanh()).sum()


def shared(weight: Tensor) -> Tensor:
    """What tanh's backward gives meets a gradient that the node of `weight.cos()` has been given too, and has not read yet."""
    x, other = weight.sin(), weight.cos()
    first = x.tanh()
    return ((x + other) ** 2).sum() + first.sum()


def own_backward(weight: Tensor) -> Tensor:
    return Twice.apply(weight).cos().sum()


def squared(weight: Tensor) -> Tensor:
    """One node gives an input two gradients, which meet there."""
    x = weight.sin()
    return (x * x).sum()


def picked(weight: Tensor) -> Tensor:
    """Gradients are put into zeros, in place where no mode watches; then they meet."""
    x = weight.sin()
    return x[torch.arange(0, WIDE, 2)].cos().sum() + x.gather(0, torch.arange(0, WIDE, 3)).exp().sum()


def sums(trace: Trace) -> list[int]:
    """Ops of backward that add."""
    return [
        op
        for op in range(trace.op_count)
        if trace.op_name(op) == "aten.add.Tensor" and trace.ops.phase[op] == 1
    ]


@pytest.mark.parametrize(
    ("loss_of", "new"),
    [(tied, [0, 0]), (joined, [0]), (shared, [1, 0]), (own_backward, [1]), (squared, [0]), (picked, [0])],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_the_profiles_peak_is_the_plain_runs(loss_of, new: list[int], tmp_path: Path) -> None:
    """`new`: does each sum take a tensor of its own?"""
    loop = loop_of(loss_of)
    trace = recorded(loop, tmp_path)
    computed, outcome = enforced(loop, plan_of(trace, lambda problem: {}), tmp_path, 6, measure=True)
    assert computed == seeded(loop, 6)
    assert outcome.measured_peak_bytes is not None
    assert abs(trace.peak_bytes - outcome.measured_peak_bytes) < 4096
    assert [trace.storages.birth_op.count(op) for op in sums(trace)] == new
