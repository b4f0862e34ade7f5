"""What a refusal says of the peak: alike tensors are one part, and so is all that the optimizer's step makes."""

from __future__ import annotations

import re
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

    def __init__(self, parameters: Any, dtype: torch.dtype, name: str) -> None:
        super().__init__(parameters, {"dtype": dtype, "name": name})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if not self.state[weight]:
                self.state[weight][self.defaults["name"]] = torch.zeros(
                    64 * weight.numel(), dtype=self.defaults["dtype"]
                )
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

    assert re.search(r"exp at test_holds.py:\d+ ×5 640 KiB", held_by(loop, tmp_path))


@pytest.mark.parametrize(
    ("dtype", "name", "told"),
    [
        (torch.float32, "exp_avg", "8-bit Adam, SGD: other results"),
        (torch.uint8, "exp_avg", "(SGD: other results"),
        (torch.float32, "old_dirs", "(SGD: other results"),
    ],
)
def test_who_has_state_of_one_byte_or_no_adam_is_not_told_to_take_that(
    dtype: torch.dtype, name: str, told: str, tmp_path: Path
) -> None:
    def loop(steps: int) -> list[str]:
        layer = nn.Linear(64, 64)
        optimizer = Stateful(layer.parameters(), dtype, name)
        for _ in range(steps):
            optimizer.zero_grad()
            layer(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        return []

    assert told in hold(loop, tmp_path).moved_by()


class Data:
    """Holds a tensor that no variable names."""

    def __init__(self) -> None:
        self.x = torch.ones(512, 2048)


def test_what_no_module_names_is_told_by_its_line_or_as_data(tmp_path: Path) -> None:
    """A data set was "left over from before", a loss of all pairs "script · div"."""
    data = Data()

    def loop(steps: int) -> list[str]:
        layer = nn.Linear(2048, 1)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            scores = layer(data.x)
            (scores - scores.T).square().mean().backward()
            optimizer.step()
        return []

    told = held_by(loop, tmp_path)
    assert "tensors there before the iteration, of no module or variable" in told
    assert "script · sub at test_holds.py:" in told


def test_parameters_that_nothing_reads_are_told(tmp_path: Path) -> None:
    """All of a VGG, of which five layers had been copied."""
    unused = nn.Linear(1024, 256)

    def loop(steps: int) -> list[str]:
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            layer(torch.ones(8, 8)).square().mean().backward()
            optimizer.step()
        return []

    moved = hold(loop, tmp_path).moved_by()
    assert moved == "less with modules deleted whose parameters (1.00 MiB) nothing in the iteration reads, unless others do (an average of weights)"  # fmt: skip
    del unused
