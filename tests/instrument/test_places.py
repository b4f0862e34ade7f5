"""Calls that are made in some iterations only: the others are found where the plan has them all the same."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt.enforcers.engine import Engine
from memopt.enforcers.handles import Planned
from memopt.enforcers.verify.digests import digest
from memopt.instrument.places import Roles, roles_of_modules
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded, state_digests

STEPS = 12
_saying: list[str] = []
"""Whose call is running."""


def _net(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, width), nn.Tanh())


def _say(name: str, module: nn.Module, x: Tensor) -> Tensor:
    _saying.append(name)
    try:
        return module(x)
    finally:
        _saying.pop()


def _now_and_then(step: int) -> bool:
    """Never in the iteration that is profiled."""
    return step in (5, 6, 9)


def samples_after_the_step(steps: int) -> list[str]:
    """As DCGAN does: the generator is called with a graph after the step."""
    torch.manual_seed(0)
    g, d = _net(), _net(1)
    for_d, for_g = (torch.optim.Adam(each.parameters()) for each in (d, g))
    found, fixed = [], torch.randn(64, 16)
    for step in range(steps):
        fake = _say("", g, torch.randn(64, 16))
        for_d.zero_grad()
        loss = _say("", d, torch.randn(64, 16)).mean() - _say("", d, fake.detach()).mean()
        loss.backward()
        for_d.step()
        for_g.zero_grad()
        lost = -_say("", d, fake).mean()
        lost.backward()
        for_g.step()
        if _now_and_then(step):
            shown = _say("extra", g, fixed)
            found.append(digest(shown))
        found += [digest(loss), digest(lost)]
    return [*found, *state_digests(g)]


def a_copy_after_the_step(steps: int) -> list[str]:
    """Another module of the same class, which the iteration meets first."""
    torch.manual_seed(0)
    net = _net(1)
    averaged = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = _say("", net, torch.randn(64, 16)).mean()
        loss.backward()
        optimizer.step()
        if _now_and_then(step):
            found.append(digest(_say("extra", averaged, torch.randn(64, 16))))
        found.append(digest(loss))
    return [*found, *state_digests(net)]


def a_lazy_penalty(steps: int) -> list[str]:
    """In the middle of the loop: the second time on, it is known to be one more."""
    torch.manual_seed(0)
    net = _net(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = _say("", net, torch.randn(64, 16)).mean()
        if step == 0 or _now_and_then(step):
            loss = loss + _say("extra", net, torch.randn(64, 16)).square().mean()
        loss = loss + _say("", net, torch.randn(64, 16)).mean().exp()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return [*found, *state_digests(net)]


def two_branches(steps: int) -> list[str]:
    """One stands for the other."""
    torch.manual_seed(0)
    net = _net(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        if _now_and_then(step):
            loss = _say("", net, torch.randn(64, 16)).mean()
        else:
            loss = _say("", net, torch.randn(64, 16)).mean()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return [*found, *state_digests(net)]


def epochs_in_a_function(steps: int) -> list[str]:
    """The function with the loop is left and called again; before each call there is a call with a graph."""
    torch.manual_seed(0)
    net = _net(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []

    def epoch(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = _say("", net, torch.randn(64, 16)).mean()
            loss.backward()
            optimizer.step()
            found.append(digest(loss))

    for _ in range(steps // 4):
        found.append(digest(_say("extra", net, torch.randn(64, 16))))
        epoch(4)
    return [*found, *state_digests(net)]


def phases(steps: int) -> list[str]:
    """The second loop takes the place of the first at once."""
    torch.manual_seed(0)
    net = _net(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for _ in range(min(steps, 6)):
        optimizer.zero_grad()
        loss = _say("", net, torch.randn(64, 16)).mean()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    for _ in range(steps - 6):
        optimizer.zero_grad()
        loss = _say("", net, torch.randn(64, 16)).mean()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return [*found, *state_digests(net)]


@pytest.mark.parametrize(
    "loop",
    [
        samples_after_the_step,
        a_copy_after_the_step,
        a_lazy_penalty,
        two_branches,
        epochs_in_a_function,
        phases,
    ],
)
def test_a_call_in_some_iterations_shifts_no_other(
    loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    planned = sum(len(action.slots) for action in plan.actions)
    assert planned
    seen = [Counter()]
    pack, new_iteration = Engine.pack, Engine.new_iteration

    def noting(engine: Engine, tensor: Tensor) -> object:
        handle = pack(engine, tensor)
        if isinstance(handle, Planned):
            seen[-1][_saying[-1] if _saying else ""] += 1
        return handle

    def beginning(engine: Engine) -> None:
        seen.append(Counter())
        new_iteration(engine)

    monkeypatch.setattr(Engine, "pack", noting)
    monkeypatch.setattr(Engine, "new_iteration", beginning)
    computed, outcome = enforced(loop, plan, tmp_path, STEPS)
    assert computed == seeded(loop, STEPS)
    assert outcome.divergences == 0
    steady = seen[2:STEPS]
    assert steady == [Counter({"": planned})] * (STEPS - 2)


def test_places_that_meet_are_told_apart_from_then_on() -> None:
    """A newcomer stands for the one that is missing, until both come: who was there more often keeps the number."""
    roles = Roles()
    for iteration in range(3):
        assert [roles.of(10, iteration), roles.of(20, iteration)] == [0, 1]
    assert roles.of(30, 3) == 0  # a branch in place of 10
    assert [roles.of(20, 4), roles.of(30, 4)] == [1, 0]
    assert [roles.of(30, 5), roles.of(10, 5), roles.of(20, 5)] == [
        0,
        2,
        1,
    ]  # both: too late for this iteration
    assert [roles.of(30, 6), roles.of(10, 6), roles.of(20, 6)] == [2, 0, 1]


def test_a_call_that_failed_leaves_its_number_to_the_next() -> None:
    roles = Roles()
    roles.of(10, 1)
    roles.release(roles.of(20, 2))
    assert roles.of(10, 2) == 0


def test_roles_keep_no_module_alive() -> None:
    roles = roles_of_modules()
    numbers = []
    for iteration in range(3):
        first, second = nn.Linear(1, 1), nn.Linear(1, 1)
        numbers.append((roles.of(first, iteration), roles.of(second, iteration)))
        del first, second
    assert numbers == [(0, 1)] * 3
    assert not roles._numbers
