"""A weight leaves in iterations that do not make the call after which it left in others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from memopt.enforcers.verify.digests import digest
from memopt.enforcers.weights.watched import WatchedWeights
from tests.enforcers.weights.test_frozen_away import WEIGHT_BYTES, WIDTH
from tests.enforcers.weights.test_trained_away import Layer, all_away, sgd
from tests.support.enforced import enforced, plan_of, recorded, seeded, state_digests

STEPS = 7


def acts_and_trains(
    steps: int,
    *,
    acts_in: Callable[[int], bool] = lambda step: True,
    instead: str = "",
    in_forward: Callable[[int], None] = lambda step: None,
) -> list[str]:
    """A network acts before another one is trained, with gradients on, as scripts of deep Q-learning have it."""
    target, model = (nn.Sequential(*[Layer() for _ in range(4)]) for _ in range(2))
    optimizer = sgd(model.parameters())
    found = []
    for step in range(steps):
        if acts_in(step):
            found.append(digest(target(torch.ones(1, WIDTH))))
        elif instead == "evaluated":
            with torch.no_grad():
                found.append(digest(model(torch.ones(1, WIDTH))))
        out = model(torch.randn(512, WIDTH))
        if not acts_in(step) and instead == "late":
            found.append(digest(target(torch.ones(1, WIDTH))))
        in_forward(step)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


@pytest.mark.parametrize("instead", ["", "late", "evaluated"])
def test_a_weight_leaves_where_the_call_before_is_not_made(
    instead: str, sessions: list[WatchedWeights], tmp_path: Path
) -> None:
    plan = plan_of(recorded(acts_and_trains, tmp_path), all_away)
    away: dict[int, int] = {}

    def look(step: int) -> None:
        away[step] = len(sessions[-1].away) if sessions else 0

    def acts_in(step: int) -> bool:
        return step not in (3, 5)

    loop = functools.partial(acts_and_trains, acts_in=acts_in, instead=instead)
    computed, outcome = enforced(
        functools.partial(loop, in_forward=look), plan, tmp_path, STEPS, measure=True
    )
    assert computed == seeded(loop, STEPS)
    assert away[3] == away[5] == away[4] >= 4, away
    assert outcome.measured_peak_bytes <= plan.predicted_peak_bytes + WEIGHT_BYTES // 8, outcome
