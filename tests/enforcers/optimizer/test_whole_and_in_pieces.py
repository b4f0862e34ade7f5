"""State that leaves in pieces in one step and as a whole in the next, that two optimizers share, and that the script goes on to look at."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from memopt.enforcers.optimizer.state_elsewhere import StateElsewhere
from memopt.enforcers.verify.digests import digest
from memopt.plan import Tier
from tests.enforcers.test_optimizer_in_pieces import plan_for
from tests.support.enforced import enforced, seeded
from tests.support.stepping import everything

STEPS = 9
Odd = Callable[[int, nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]


def sparse_once(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """No step with a sparse gradient is taken in pieces."""
    weight = model[0].weight
    if step == 4:
        weight.grad = weight.grad.to_sparse()
    return optimizer


def frozen(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """None with a gradient of a frozen parameter is, either."""
    if step in (3, 5):
        model[1].weight.requires_grad_(step == 5)
        model[1].weight.grad = torch.ones_like(model[1].weight)
    return optimizer


shared: dict[int, torch.optim.Optimizer] = {}


def another(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Every third step is that of another optimizer, whose state is the same."""
    if step == 3:
        shared[0] = copy.copy(optimizer)
    return shared[0] if step >= 3 and step % 3 == 0 else optimizer


@pytest.mark.parametrize("odd", [sparse_once, frozen, another])
@pytest.mark.parametrize("whole_from", [0, 1])
def test_the_same_state_whichever_way_it_has_left(odd: Odd, whole_from: int, tmp_path: Path) -> None:
    def loop(steps: int) -> list[str]:
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 64)).square().mean()
            loss.backward()
            odd(step, model, optimizer).step()
            found.append(digest(loss))
        shared.clear()
        return [*found, *everything(model, optimizer)]

    plan = plan_for("disk")
    action = msgspec.structs.replace(plan.script_actions[0], whole_from_bytes=whole_from)
    plan = msgspec.structs.replace(plan, script_actions=[action])
    computed, _ = enforced(loop, plan, tmp_path, STEPS)
    assert computed == seeded(loop, STEPS)


@pytest.mark.parametrize("tier", [None, "disk"])
def test_an_optimizer_that_keeps_no_state_has_no_entry_after_steps_in_pieces(
    tier: Tier | None, tmp_path: Path
) -> None:
    entries: list[int] = []

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
        entries.append(len(optimizer.state_dict()["state"]))
        return everything(model, optimizer)

    computed, _ = enforced(loop, plan_for(tier), tmp_path, STEPS)
    assert computed == seeded(loop, STEPS)
    assert entries[0] == entries[1]


def elsewhere() -> tuple[StateElsewhere, list[int]]:
    looks: list[int] = []
    state = StateElsewhere({"a": {"b": 1}}, lambda: None)
    state.looked_at = lambda: looks.append(1)
    return state, looks


@pytest.mark.parametrize(
    "copied", [copy.copy, lambda state: state.copy(), lambda state: state | {}, lambda state: {} | state]
)
def test_a_copy_of_the_state_is_what_torch_makes(copied: Callable[[StateElsewhere], object]) -> None:
    state, looks = elsewhere()
    found = copied(state)
    assert found == {"a": {"b": 1}}
    assert not isinstance(found, StateElsewhere)
    assert isinstance(found, defaultdict)
    assert looks


def test_each_look_at_a_view_or_an_iterator_of_it_finds_it_whole() -> None:
    state, looks = elsewhere()
    views = state.values(), state.items(), iter(state.items())
    looks.clear()
    assert [*views[0]] == [{"b": 1}]
    assert len(looks) == 1
    assert [*views[1]] == [("a", {"b": 1})]
    assert next(views[2]) == ("a", {"b": 1})
    assert len(looks) == 3
    assert not state != {"a": {"b": 1}}  # noqa: SIM202
    assert len(looks) == 4
