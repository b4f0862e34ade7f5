"""Evaluations between steps, and after the last: no training's peak, and told wherever they come."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from memopt.enforcers.measurements import MEASURED
from memopt.enforcers.verify.digests import digest
from tests.support.enforced import enforced, plan_of, recorded, seeded
from tests.support.enforced import everything as all_of

WIDTH, ROWS, MANY = 64, 256, 8192
STEPS = MEASURED[2] + 3


def classifier(steps: int, before: int = 0, *, has_teacher: bool = False) -> list[str]:
    """Before step `before`, or after the last, it looks at how right it is, about many rows."""
    teacher = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

    def evaluated() -> str:
        with torch.no_grad():
            rows = torch.randn(MANY, WIDTH)
            return digest(model(rows).argmax(-1).float())

    found = []
    for step in range(steps):
        if step and step == before:
            found.append(evaluated())
        rows, target = torch.randn(ROWS, WIDTH), 0.0
        if has_teacher:
            with torch.no_grad():
                target = teacher(rows)
        loss = (model(rows) - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return [*found, evaluated()] if before == steps else found


@pytest.mark.parametrize("before", [MEASURED[2] - 1, MEASURED[2], STEPS], ids=["measured", "not measured", "after the last step"])  # fmt: skip
@pytest.mark.parametrize("has_teacher", [False, True])
def test_an_evaluation_is_no_trainings_peak_and_is_told(
    has_teacher: bool, before: int, tmp_path: Path
) -> None:
    """Its batch is there before the module is called, and what it makes of the results after that."""
    trains = functools.partial(classifier, has_teacher=has_teacher)
    plan = plan_of(recorded(trains, tmp_path), all_of("swap"))
    assert plan.without_gradients is has_teacher
    loop = functools.partial(trains, before=before)
    computed, outcome = enforced(loop, plan, tmp_path, STEPS, measure=True)
    assert computed == seeded(loop, STEPS)
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.02)
    assert outcome.outside_peak_bytes > plan.predicted_peak_bytes + MANY * WIDTH * 4
    assert any("an evaluation" in note for note in outcome.notes)
