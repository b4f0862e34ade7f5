"""What a step takes is known before the first one, and nothing is touched to know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.enforcers.optimizer.first_step import gradients_to_come, made_by_first_step, temporaries_of
from memopt.enforcers.verify.digests import digest

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
}


def trained(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8).to(torch.float64))
    model[0].bias.requires_grad_(False)
    return model, make(model.parameters())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    state = (value for each in optimizer.state.values() for value in each.values())
    return sum(each.nbytes for each in state if isinstance(each, Tensor) and each.dim())


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_state_that_it_will_make(make: Make) -> None:
    model, optimizer = trained(make)
    before = [digest(each) for each in model.parameters()]
    made = made_by_first_step(optimizer)
    if not isinstance(optimizer, torch.optim.Adagrad):  # has it from the beginning
        assert not optimizer.state
        assert [digest(each) for each in model.parameters()] == before
        for each in model.parameters():
            each.grad = torch.ones_like(each) if each.requires_grad else None
        optimizer.step()
        assert made == state_bytes(optimizer)
    assert made_by_first_step(optimizer) == 0


def test_of_an_optimizer_that_cannot_step_in_pieces_nothing_is_known() -> None:
    class Own(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            raise AssertionError

    assert made_by_first_step(trained(Own)[1]) == 0


def test_temporaries_and_gradients() -> None:
    model, optimizer = trained(torch.optim.Adam)
    assert temporaries_of(optimizer) == 2 * 64 * 64 * 4
    optimizer.param_groups[0]["foreach"] = True
    assert temporaries_of(optimizer) == 64 * 64 * 4 + (64 * 8 + 8) * 8
    assert gradients_to_come(optimizer) == 64 * 64 * 4 + (64 * 8 + 8) * 8
    model[0].weight.grad = torch.ones_like(model[0].weight)
    assert gradients_to_come(optimizer) == (64 * 8 + 8) * 8
