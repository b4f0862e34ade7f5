"""What a script does before it trains runs at its own speed, whatever its plan is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.enforcers.engine import Engine
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded


@pytest.mark.parametrize("own", [False, True], ids=["torchs_optimizer", "no_optimizer"])
def test_preparation_is_not_watched_where_actions_lie_outside_modules(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training begins outside modules, too: with the optimizer, or with what is saved first."""
    watched: list[bool] = []
    prepares = False

    def loop(steps: int) -> list[str]:
        nonlocal prepares
        prepares = True
        table = torch.zeros(64)
        for at in range(64):
            table[at] = at
        weight = torch.nn.Parameter(torch.randn(64, 64))
        prepares = False
        optimizer = None if own else torch.optim.SGD([weight], 0.1)
        found = []
        for _ in range(steps):
            hidden = torch.tanh(torch.tanh(table * 0.01 + weight) * 0.5)
            loss = (hidden @ weight).square().mean()
            loss.backward()
            if optimizer is None:
                weight = torch.nn.Parameter(weight.detach() - 0.1 * weight.grad)
            else:
                optimizer.step()
                optimizer.zero_grad()
            found.append(str(loss.item()))
        return found

    dispatch = Engine.dispatch

    def seen(engine: Engine, *args: Any) -> Any:
        watched.append(prepares)
        return dispatch(engine, *args)

    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    assert any(slot.module == "@" for action in plan.actions for slot in action.slots)
    init = torch.optim.Optimizer.__init__
    monkeypatch.setattr(Engine, "dispatch", seen)
    computed, outcome = enforced(loop, plan, tmp_path, 20)
    assert computed == seeded(loop, 20)
    assert watched
    assert not any(watched)
    assert outcome.actions.done > 0
    assert torch.optim.Optimizer.__init__ is init
