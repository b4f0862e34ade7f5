"""What a refusal says of the peak: alike tensors are one part, and so is all that the optimizer's step makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def held_by(loop: Any, folder: Path) -> str:
    _, problem = problem_of(recorded(loop, folder))
    timeline = problem.run({})
    return Hold(problem, timeline.peak_op, timeline.peak_bytes).held_by()


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
