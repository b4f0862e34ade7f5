"""Which optimizer's steps divide a run into iterations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.instrument.iterations import Iterations
from tests.enforced import recorded


class Log:
    """A listener that writes down what ends when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        self.events.append(f"end {count}")

    def backward_begins(self, roots: Any, *, keep_graph: bool, create_graph: bool) -> None: ...
    def backward_ended(self) -> None: ...
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None: ...

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append(str(optimizer.defaults["lr"]))


def steps(order: str) -> list[str]:
    """What is logged when optimizers step in `order`: one digit an optimizer, its learning rate."""
    log = Log()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizers = {name: torch.optim.SGD([weight], lr=int(name)) for name in set(order)}
    iterations = Iterations(log)
    iterations.install()
    try:
        for name in order:
            optimizers[name].step()
    finally:
        iterations.remove()
    return log.events


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("111", ["1", "end 1", "1", "end 2", "1", "end 3"]),
        # a GAN: from the second round on, iterations end after the generator's step
        ("121212", ["1", "end 1", "2", "end 2", "1", "2", "end 3", "1", "2", "end 4"]),
        ("123123", ["1", "end 1", "2", "end 2", "3", "end 3", "1", "2", "3", "end 4"]),
        # one that joins late does not move the boundary
        ("11121112", ["1", "end 1", "1", "end 2", "1", "end 3", "2", "1", "end 4", "1", "end 5", "1", "end 6", "2"]),
    ],
)  # fmt: skip
def test_boundary(order: str, ends: list[str]) -> None:
    assert steps(order) == ends


def test_the_plain_step_of_two_optimizers_is_a_whole_one(tmp_path: Path) -> None:
    """The first round ends two iterations, one at each optimizer's first step; neither is a whole step."""

    def two(steps: int) -> list[str]:
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        one, other = torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)
        for _ in range(steps):
            time.sleep(0.2)
            for model, optimizer in ((first, one), (second, other)):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        return []

    trace = recorded(two, tmp_path)
    assert trace.step_ms > 200
    assert trace.facts["backward_calls"] == 2
