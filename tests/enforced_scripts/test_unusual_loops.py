"""Loops that are written unlike most: found again, recorded and enforced all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.enforcers.verify.digests import digest
from memopt.errors import BudgetInfeasible
from tests.support import warm
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> Iterator[str]:
    for _ in range(count):
        loss = nn.CrossEntropyLoss()(model(torch.randn(64, 16)), torch.arange(64) % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield digest(loss)


def losses_made_anew(steps: int) -> list[str]:
    model = Net()
    return [*_steps(model, torch.optim.SGD(model.parameters(), 0.1), steps)]


def an_ensemble(steps: int) -> list[str]:
    """Its members are trained one after the other, and all of them, with their optimizers, are there all the time."""
    models = [Net() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    first = min(steps, 17)
    found = [*_steps(models[0], optimizers[0], first)]
    return [*found, *_steps(models[1], optimizers[1], steps - first)]


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 32:
            raise ValueError("half a batch")
        return x


def bad_batches(steps: int) -> list[str]:
    """Every fourth batch is too small, which the third layer finds; the loop goes on with the next one."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Picky(), Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(steps):
        try:
            if step % 4 == 3:
                model(torch.randn(32, 16))
        except ValueError as error:
            found.append(str(error))
        found += _steps(model, optimizer, 1)
    return found


@pytest.mark.parametrize("loop", [losses_made_anew, an_ensemble, bad_batches])
def test_every_iteration_is_enforced(loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of another phase still counts to the iteration of the next."""
    from memopt.enforcers.engine import Engine

    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    planned = sum(len(action.slots) for action in plan.actions)
    taken = []
    new_iteration = Engine.new_iteration

    def noting(engine: Engine) -> None:
        taken.append(engine.account.done.total())
        new_iteration(engine)

    monkeypatch.setattr(Engine, "new_iteration", noting)
    computed, outcome = enforced(loop, plan, tmp_path, 21)
    assert computed == seeded(loop, 21)
    assert outcome.divergences == 0
    assert len(taken) == (20 if loop is an_ensemble else 21)
    if loop is bad_batches:
        assert [count - planned for count in taken] == [int(step % 4 == 3) for step in range(21)]
    else:
        assert set(taken) == {planned}


def test_modes_of_the_script_stay_its_own(tmp_path: Path) -> None:
    """Each step lies inside a `with`, whose end must not take the recorder for the script's mode."""

    def loop(steps: int) -> list[str]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for _ in range(steps):
            with FlopCounterMode(display=False) as counter:
                found += _steps(model, optimizer, 1)
            found.append(str(counter.get_total_flops()))
            assert _get_current_dispatch_mode() is not counter
        return found

    plain = seeded(loop, 6)
    trace = recorded(loop, tmp_path)
    assert [trace.op_name(op) for op in range(trace.op_count)].count("aten.addmm.default") == 3
    assert _get_current_dispatch_mode() is None
    assert seeded(loop, 6) == plain
    computed, outcome = enforced(loop, plan_of(trace, everything("recompute")), tmp_path, 6)
    assert computed == plain
    assert outcome.actions.done > 0


def test_a_peak_that_no_op_explains_is_refused(tmp_path: Path) -> None:
    trace = recorded(losses_made_anew, tmp_path)
    higher = msgspec.structs.replace(trace, peak_bytes=3 * trace.peak_bytes)
    with pytest.raises(BudgetInfeasible, match="cannot be met"):
        Adviser(higher, allowed((), ())).decide(2 * trace.peak_bytes)


UNJOINED = """
import threading
import torch

def train():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.ones(256, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, flush=True)

threading.Thread(target=train).start()
print("main is over", flush=True)
"""


def test_a_thread_that_nobody_joins_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNJOINED)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = warm.python(["-m", "memopt", "profile", "--keep-running", "train.py"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0", "1", "2", "3", "main is over"]
    assert "memopt: wrote memopt-train.profile.json.gz" in done.stderr


@pytest.mark.parametrize("checks", [1, 3, 12])
def test_backward_calls_before_there_is_an_optimizer_are_no_iterations(checks: int, tmp_path: Path) -> None:
    """A gradient check, or a warm-up: what is recorded is a whole step all the same."""

    def loop(steps: int) -> list[str]:
        model = Net()
        for _ in range(checks):
            model(torch.randn(64, 16)).sum().backward()
        return [*_steps(model, torch.optim.SGD(model.parameters(), 0.1), steps)]

    def usual(steps: int) -> list[str]:
        model = Net()
        return [*_steps(model, torch.optim.SGD(model.parameters(), 0.1), steps)]

    expected, trace = recorded(usual, tmp_path), recorded(loop, tmp_path)
    assert [trace.op_name(op) for op in range(trace.op_count)] == [
        expected.op_name(op) for op in range(expected.op_count)
    ]
