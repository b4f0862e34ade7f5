"""State that `load_state_dict` has taken from a checkpoint which the script goes on to hold: it leaves all the same, and whoever reads the
checkpoint finds there what steps have made of it since, as torch has it."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.instrument.memory.meter import living_storages
from memopt.instrument.stepping.handed_out import HandedOut
from memopt.instrument.stepping.loaded_state import share_with_checkpoint
from tests.enforcers.optimizer.test_gradients_elsewhere import plan as pieces_plan
from tests.enforcers.optimizer.test_handed_out import LOOKS, WIDE, numbers
from tests.enforcers.optimizer.test_state_away import training
from tests.support.enforced import enforced, seeded

STEPS = 7


@pytest.mark.parametrize("look", sorted(LOOKS.keys() - {"writes"}))
def test_a_checkpoint_that_is_held_has_what_the_steps_have_made_of_it(look: str, tmp_path: Path) -> None:
    """And is away otherwise: training that was resumed in the usual way kept all of its state on the device."""
    there: list[int] = []
    checkpoint: dict[str, Any] = {}

    def between(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        there.append(sum(each.nbytes() for each in living_storages("cpu")))
        if step == 1:
            checkpoint["optimizer"] = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(checkpoint["optimizer"])
        return LOOKS[look](checkpoint["optimizer"]) if step == 4 else []

    def loop(steps: int) -> list[str]:
        checkpoint.clear()
        make = training(lambda p: torch.optim.AdamW(p, lr=0.01), between)
        return [*make(steps), *numbers(checkpoint)]

    plain = seeded(loop, STEPS)
    before, there[:] = list(there), []
    computed, outcome = enforced(loop, pieces_plan(), tmp_path, STEPS)
    assert computed == plain, outcome
    less = [a - b for a, b in zip(before, there, strict=True)]
    assert less[3] == less[6] == pytest.approx(less[1], rel=0.05), "as before it was loaded"
    assert less[3] > 2 * 4 * WIDE * WIDE * 0.9


def test_it_may_be_loaded_once_more(tmp_path: Path) -> None:
    """The best state so far, to which a run goes back twice: the second time it has what the steps since the first have made of it."""
    best: dict[str, Any] = {}

    def between(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        if step == 1:
            best["optimizer"] = copy.deepcopy(optimizer.state_dict())
        if step in (2, 4):
            optimizer.load_state_dict(best["optimizer"])
        return []

    def loop(steps: int) -> list[str]:
        best.clear()
        return [*training(lambda p: torch.optim.AdamW(p, lr=0.01), between)(steps), *numbers(best)]

    plain = seeded(loop, STEPS)
    computed, outcome = enforced(loop, pieces_plan(), tmp_path, STEPS)
    assert computed == plain, outcome


def loaded() -> tuple[dict[Any, Any], dict[int, dict[str, torch.Tensor]]]:
    """A state, and the checkpoint that it was loaded from."""
    checkpoint = {n: {"step": torch.tensor(1.0), "exp_avg": torch.ones(8)} for n in range(2)}
    state: dict[Any, Any] = defaultdict(dict)
    for inner in checkpoint.values():
        state[torch.nn.Parameter(torch.ones(8))] = dict(inner)
    del inner
    return state, checkpoint


def test_both_have_one_dict_of_each_parameter() -> None:
    state, checkpoint = loaded()
    before = [{name: id(value) for name, value in each.items()} for each in state.values()]
    share_with_checkpoint(state)
    assert all(one is other for one, other in zip(state.values(), checkpoint.values(), strict=True))
    for inner, kept in zip(state.values(), before, strict=True):
        assert type(inner) is HandedOut
        assert {name: id(inner[name]) for name in inner} == kept


@pytest.mark.parametrize("holds", ["a tensor", "a dict of the checkpoint", "a dict of the state", "another tensor there", "nothing"])  # fmt: skip
def test_what_anybody_else_holds_is_left_alone(holds: str) -> None:
    state, checkpoint = loaded()
    first = next(iter(state))
    held: Any = None
    if holds == "a tensor":
        held = checkpoint[0]["exp_avg"]
    elif holds == "a dict of the checkpoint":
        held = checkpoint[0]
    elif holds == "a dict of the state":
        held = state[first]
    elif holds == "another tensor there":
        checkpoint[0]["exp_avg"] = torch.ones(8)
    else:
        held = object()
    share_with_checkpoint(state)
    assert (type(state[first]) is HandedOut) is (holds == "nothing")
    assert type(checkpoint[1]) is HandedOut, "the other parameter's"
    assert held is not None or holds == "another tensor there"


def test_nobody_is_looked_for_where_the_state_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes tens of milliseconds where a million objects live."""
    state, checkpoint = loaded()
    del checkpoint
    monkeypatch.setattr(gc, "get_referrers", None)
    share_with_checkpoint(state)
    assert all(type(each) is dict for each in state.values())
