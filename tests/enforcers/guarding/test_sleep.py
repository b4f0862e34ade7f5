"""Between the end of an iteration and the next call of a module nobody watches ops: a batch is made of hundreds of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.enforcers.guarding.live_bytes import Live
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.costs import usual_ms
from memopt.instrument import modes
from tests.enforcers.guarding.test_guard import guarded
from tests.support.enforced import Loop, enforced, everything, plan_of, recorded, seeded

MIB = 1 << 20
SEEN: list[str] = []


def watchers() -> str:
    """Of ops, here."""
    return " ".join(type(each).__name__ for each in modes.current_modes() if isinstance(each, modes.Mode))


class Normalized(nn.Module):
    """A transform: it has no parameters, and is called on the script's data."""

    def forward(self, image: Tensor) -> Tensor:
        SEEN.append(watchers())
        return (image - 0.5) / 0.25


class Told(torch.optim.SGD):
    """Each parameter is several ops."""

    def step(self, closure: Any = None) -> Any:
        SEEN.append(f"stepping {watchers()}")
        return super().step(closure)


class Between:
    """Keeps what a script makes between iterations."""

    def __init__(self, kept_bytes: int) -> None:
        self.kept_bytes, self.kept = kept_bytes, list[Tensor]()

    def __call__(self, step: int) -> None:
        if self.kept_bytes and step == 3:
            self.kept.append(torch.zeros(self.kept_bytes // 4))


def on_images(between: Callable[[int], None] = lambda step: None, images: int = 16) -> Loop:
    def loop(steps: int) -> list[str]:
        transform = Normalized()
        model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)])
        optimizer = Told(model.parameters(), lr=0.1)
        found = []
        for step in range(steps):
            batch = torch.stack([transform(torch.rand(64, 1024)) for _ in range(images)]).flatten(0, 1)
            between(step)
            loss = model(batch).square().mean()
            SEEN.append(f"in training {watchers()}")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(digest(loss))
        return found

    return loop


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def test_the_guard_sleeps_while_a_batch_is_made_and_counts_it_all_the_same(tmp_path: Path) -> None:
    plain, free = guarded(on_images(), tmp_path, 1 << 40)
    first = SEEN.index("in training Guard")
    assert set(SEEN[first:]) == {"", "in training Guard", "stepping Guard"}
    budget = int(0.8 * free.most_bytes)
    computed, guard = guarded(on_images(), tmp_path, budget)
    assert computed == plain == seeded(on_images(), 6)
    assert guard.moved > 0
    assert guard.passed.most_bytes == 0


def test_what_the_script_makes_and_keeps_meanwhile_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = Live.look_around
    monkeypatch.setattr(Live, "look_around", lambda self: (looks.append(1), look(self))[1])
    _, free = guarded(on_images(Between(0)), tmp_path, 128 * MIB)
    assert len(looks) <= 3, "no look in each iteration"
    _, guard = guarded(on_images(Between(16 * MIB)), tmp_path, 128 * MIB)
    assert guard.most_bytes >= free.most_bytes + 15 * MIB


def test_a_graph_that_lives_on_may_leave_meanwhile(tmp_path: Path) -> None:
    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        kept = None
        for _ in range(steps):
            SEEN.append(watchers())
            loss = model(torch.rand(512, 512)).square().mean()
            (loss if kept is None else loss + kept).backward()
            kept = nn.functional.gelu(torch.rand(512, 512) * model[0][0].bias).mean()
            optimizer.step()
            optimizer.zero_grad()
            found.append(digest(loss))
        return found

    computed, _ = guarded(loop, tmp_path, 1 << 40)
    assert computed == seeded(loop, 6)
    assert set(SEEN[2:6]) == {"Guard"}


def test_a_plan_watches_nothing_before_what_it_names(tmp_path: Path) -> None:
    plan = plan_of(recorded(on_images(), tmp_path), everything("recompute"))
    SEEN.clear()
    computed, outcome = enforced(on_images(), plan, tmp_path, 5, measure=True)
    seen = list(SEEN)
    assert computed == seeded(on_images(), 5)
    assert set(seen) == {"", "in training Engine", "stepping "}
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert outcome.measured_peak_bytes <= 1.01 * plan.predicted_peak_bytes


def test_what_is_not_watched_costs_nothing(tmp_path: Path) -> None:
    few, many = (usual_ms(recorded(on_images(images=n), tmp_path)) for n in (16, 200))
    assert few == many > 0
