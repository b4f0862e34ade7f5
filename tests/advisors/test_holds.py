"""What a refusal says of the peak: alike tensors are one part, and so is all that the optimizer's step makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt.advisors.profiles.holds import Hold
from tests.support.enforced import problem_of, recorded


class Wasteful(torch.optim.Optimizer):
    """As one on a manifold: many temporaries as large as the parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            made = [weight * 2, weight + 1, weight.neg(), weight.exp()]
            weight.sub_(torch.stack(made).sum(0), alpha=1e-3)


class Stateful(torch.optim.Optimizer):
    """With much state of one type."""

    def __init__(self, parameters: Any, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if not self.state[weight]:
                self.state[weight]["many"] = torch.zeros(64 * weight.numel(), dtype=self.defaults["dtype"])
            weight.sub_(weight.grad, alpha=1e-3)


def hold(loop: Any, folder: Path) -> Hold:
    _, problem = problem_of(recorded(loop, folder))
    timeline = problem.run({})
    return Hold(problem, timeline.peak_op, timeline.peak_bytes)


def held_by(loop: Any, folder: Path) -> str:
    return hold(loop, folder).held_by()


def test_what_the_step_makes_is_one_part(tmp_path: Path) -> None:
    def loop(steps: int) -> list[str]:
        layer = nn.Linear(256, 256, bias=False)
        optimizer = Wasteful(layer.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            layer(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
        return []

    assert held_by(loop, tmp_path).startswith("held by temporaries of the step 2.00 MiB, parameters 256 KiB")


def test_alike_tensors_are_one_part(tmp_path: Path) -> None:
    def loop(steps: int) -> list[str]:
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            x = layer(torch.randn(4096, 8))
            parts = [x.exp() for _ in range(5)]
            torch.stack(parts).sum().backward()
            optimizer.step()
        return []

    assert "exp ×5 640 KiB" in held_by(loop, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "told"),
    [(torch.float32, "8-bit Adam, SGD: other results"), (torch.uint8, "(SGD: other results")],
)
def test_who_has_state_of_one_byte_is_not_told_to_take_that(
    dtype: torch.dtype, told: str, tmp_path: Path
) -> None:
    def loop(steps: int) -> list[str]:
        layer = nn.Linear(64, 64)
        optimizer = Stateful(layer.parameters(), dtype)
        for _ in range(steps):
            optimizer.zero_grad()
            layer(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        return []

    assert told in hold(loop, tmp_path).moved_by()
