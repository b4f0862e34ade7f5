"""What is drawn again in one replay after the other: the generator's states are held, and predicted, until the last of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from memopt.enforcers.verify.digests import digest
from tests.support.enforced import all_again, enforced, plan_of, recorded, seeded, state_digests


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


def test_states_count_until_the_last_replay_that_draws_from_them(tmp_path: Path) -> None:
    plan = plan_of(recorded(noisy, tmp_path), all_again)
    computed, outcome = enforced(noisy, plan, tmp_path, 4, measure=True)
    assert computed == seeded(noisy, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert outcome.measured_peak_bytes == plan.predicted_peak_bytes
