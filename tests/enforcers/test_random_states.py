"""What a record holds (the state of a generator, a source of its op): held, and predicted, until nobody waits for what it makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import RECOMPUTE
from tests.support.enforced import Loop, all_again, enforced, plan_of, recorded, seeded, state_digests


def noisy(steps: int) -> list[str]:
    """Six layers with dropout, small beside the states of its generator, and wide ones in which the peak is."""
    small = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))]
    wide = [nn.Linear(32, 500), nn.Tanh(), nn.Tanh(), nn.Linear(500, 8), nn.Tanh()]
    net = nn.Sequential(*small, *wide)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(64, 32)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return found + state_digests(net)


def passed_on(drawn: Callable[[], Tensor]) -> Loop:
    """`tanh`'s result makes `noise` on the way, which waits for `first` over the wide layers, where the peak is. What is `drawn` has had its
    own backward by then."""

    def loop(steps: int) -> list[str]:
        before, first = nn.Linear(32, 32), nn.Linear(32, 32)
        wide = nn.Sequential(nn.Linear(32, 500), nn.Tanh(), nn.Tanh(), nn.Linear(500, 8))
        net = nn.ModuleList([before, first, wide])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            source = drawn()
            noise = before(torch.randn(64, 32)) + source
            high = wide(first(noise))
            loss = ((noise * source).tanh() * noise).mean() + high.square().mean()
            del source, noise, high
            loss.backward()
            optimizer.step()
            found.append(digest(loss))
        return found + state_digests(net)

    return loop


def on_the_way(problem: Problem) -> Decisions:
    """As `all_again`, and what was made on the way to something else is held."""
    return dict.fromkeys(all_again(problem), RECOMPUTE)


def a_draw() -> Tensor:
    return torch.randn(64, 32)


def a_source() -> Tensor:
    """No replay makes it: how many there are depends on values."""
    return torch.ones(32).nonzero()[:, 0]


@pytest.mark.parametrize("drawn", [a_draw, a_source])
def test_records_live_as_long_as_what_they_made_on_the_way(
    drawn: Callable[[], Tensor], tmp_path: Path
) -> None:
    loop = passed_on(drawn)
    plan = plan_of(recorded(loop, tmp_path), on_the_way)
    computed, outcome = enforced(loop, plan, tmp_path, 4, measure=True)
    assert computed == seeded(loop, 4)
    assert outcome.actions.done == outcome.actions.planned > 0, outcome.notes
    assert outcome.measured_peak_bytes == plan.predicted_peak_bytes


def test_states_count_until_the_last_replay_that_draws_from_them(tmp_path: Path) -> None:
    plan = plan_of(recorded(noisy, tmp_path), all_again)
    computed, outcome = enforced(noisy, plan, tmp_path, 4, measure=True)
    assert computed == seeded(noisy, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert outcome.measured_peak_bytes == plan.predicted_peak_bytes
