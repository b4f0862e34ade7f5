"""`kill -9` at any moment of a run whose state, gradients and saved tensors are away: no file is left, checkpoints are whole."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from memopt.enforcers.optimizer import gradients_elsewhere
from memopt.enforcers.session import ApplySession, Options
from memopt.enforcers.verify.digests import digest
from memopt.plan import Plan
from tests.enforcers.optimizer.test_gradients_elsewhere import plan
from tests.support.enforced import SWAP, Loop, plan_of, recorded, seeded
from tests.support.stepping import everything

STEPS = 12


def saving(checkpoint: Path) -> Loop:
    """A loop that writes a checkpoint after each step, as one should: beside it, then in its place."""

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(128, 96)).square().mean().backward()
            optimizer.step()
            torch.save((step, model.state_dict(), optimizer.state_dict()), f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
        return everything(model, optimizer)

    return loop


def _train_until_killed(loop: Loop, both: Plan, swaps: Path) -> None:
    session = ApplySession(both, Options(swap_dir=swaps, measure=False))
    session.install()
    seeded(loop, STEPS)
    time.sleep(60)


def _held_by(checkpoint: Path) -> tuple[int, str]:
    step, model, optimizer = torch.load(checkpoint, weights_only=True)
    tensors = [*model.values(), *(value for inner in optimizer["state"].values() for value in inner.values())]
    assert len(tensors) == 4 * len(model)
    return step, "".join(map(digest, tensors))


def _and_then(call: Callable[..., Any], then: Callable[[], Any]) -> Callable[..., None]:
    def both(*args: Any) -> None:
        call(*args)
        then()

    return both


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """A forked child has no others, and sums in another order than two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
def test_nothing_is_left_and_checkpoints_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, swaps = tmp_path / "c.pt", tmp_path / "swaps"
    swaps.mkdir()
    loop = saving(checkpoint)
    made = plan_of(recorded(loop, tmp_path), lambda problem: dict.fromkeys(problem.candidates, SWAP))
    both = msgspec.structs.replace(made, script_actions=plan().script_actions)
    wanted: list[tuple[int, str]] = []
    began = time.monotonic()
    monkeypatch.setattr(os, "replace", _and_then(os.replace, lambda: wanted.append(_held_by(checkpoint))))
    seeded(loop, STEPS)
    monkeypatch.undo()
    monkeypatch.setattr(gradients_elsewhere, "LEAST_BYTES", 1)
    took, seen = time.monotonic() - began, set[int]()
    for draw in (random.Random(each) for each in range(5)):
        checkpoint.unlink()
        child = os.fork()
        if child == 0:
            try:
                _train_until_killed(loop, both, swaps)
            finally:
                os._exit(3)
        ends = time.monotonic() + 60
        while not checkpoint.exists():
            assert time.monotonic() < ends, "the child hangs"
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.001)
        time.sleep(took * draw.random())
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert not list(swaps.iterdir())
        step, held = _held_by(checkpoint)
        assert (step, held) == wanted[step]
        seen.add(step)
    assert len(seen) > 1
