"""What `state_dict()` has given a script that keeps it: the state leaves all the same, and whoever reads what was given finds what a plain run has
there."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from memopt.enforcers.optimizer.state_elsewhere import stand_in
from memopt.enforcers.verify.digests import digest
from memopt.instrument.memory.meter import living_storages
from memopt.instrument.stepping.handed_out import HandedOut
from memopt.plan import Plan
from tests.enforcers.optimizer.test_gradients_elsewhere import plan as pieces_plan
from tests.enforcers.optimizer.test_state_away import Own, plan_for, training
from tests.support.enforced import enforced, seeded

WIDE = 96
STEPS = 6
WAYS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[], Plan]]] = {
    "in pieces": (lambda p: torch.optim.AdamW(p, lr=0.01), pieces_plan),
    "as a whole": (Own, plan_for),
}


def of_bytes(thing: Any) -> str:
    file = io.BytesIO()
    torch.save(thing, file)
    return digest(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))


def numbers(thing: Any) -> list[str]:
    """Of all tensors in it, in order."""
    if isinstance(thing, torch.Tensor):
        return [digest(thing)]
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    return [each for part in parts for each in numbers(part)]


def loaded_again(kept: Any) -> list[str]:
    file = io.BytesIO()
    torch.save({"optimizer": kept, "more": [kept["state"]]}, file)
    file.seek(0)
    return numbers(torch.load(file))  # by default of what is trusted: no class of memopt's


def saved_by_another_name(kept: Any) -> list[str]:
    """`from torch import save`, at the top of the script."""
    file = io.BytesIO()
    inspect.unwrap(torch.save)({"optimizer": kept}, file)
    file.seek(0)
    return numbers(torch.load(file))


def counted(kept: Any) -> list[str]:
    (first, *_) = kept["state"].values()
    there = "exp_avg" in first, len(first), sorted(first), [*reversed(first)], bool(first), first.get("none")
    return [repr(there), digest(first["exp_avg"]), *numbers(dict(first)), *numbers({**first})]


def written(kept: Any) -> list[str]:
    """What is written there is the optimizer's."""
    for inner in kept["state"].values():
        inner["exp_avg"] = inner["exp_avg"] * 0.5
    return []


LOOKS: dict[str, Callable[[Any], list[str]]] = {
    "saves it": lambda kept: [of_bytes(kept)],
    "loads what it saves": loaded_again,
    "saves it by another name": saved_by_another_name,
    "counts": counted,
    "writes": written,
    "copies it": lambda kept: [*numbers(copy.deepcopy(kept)), *numbers(copy.copy(kept["state"]))],
    "pickles it": lambda kept: numbers(pickle.loads(pickle.dumps(kept))),
    "goes through it as a tree": lambda kept: numbers(tree_map(lambda each: each, kept["state"])),
    "joins it": lambda kept: [each for inner in kept["state"].values() for each in numbers(inner | {"a": 1})],
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_is_the_optimizers_own_whenever_it_is_read(way: str, look: str, tmp_path: Path) -> None:
    """And is away otherwise: a checkpoint in a variable kept all of it on the device from the first one on."""
    make, plan = WAYS[way]
    there: list[int] = []
    kept: dict[str, Any] = {}

    def between(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        there.append(sum(each.nbytes() for each in living_storages("cpu")))
        if step == 1:
            kept.update(optimizer.state_dict())
            return [of_bytes(kept)]
        return LOOKS[look](kept) if step == 4 else []

    def loop(steps: int) -> list[str]:
        kept.clear()
        return [*training(make, between)(steps), *numbers(kept)]

    plain = seeded(loop, STEPS)
    before, there[:] = list(there), []
    computed, outcome = enforced(loop, plan(), tmp_path, STEPS)
    assert computed == plain, outcome
    less = [a - b for a, b in zip(before, there, strict=True)]
    assert less[3] == pytest.approx(less[1], rel=0.05), "as before the checkpoint"
    assert less[3] > 2 * 4 * WIDE * WIDE * 0.9


@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_outlives_the_optimizers_state(way: str, tmp_path: Path) -> None:
    """Another state is loaded, or the optimizer is gone."""
    make, plan = WAYS[way]
    kept: list[Any] = []
    early: list[Any] = []

    def between(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        if step in (1, 4):
            kept.append(optimizer.state_dict())
        if step == 1:
            early.append(copy.deepcopy(kept[0]))
        if step == 3:
            optimizer.load_state_dict(early[0])
            return numbers(kept)
        return []

    def loop(steps: int) -> list[str]:
        kept.clear()
        early.clear()
        return [*training(make, between)(steps), *numbers(kept)]

    plain = seeded(loop, STEPS)
    computed, outcome = enforced(loop, plan(), tmp_path, STEPS)
    assert computed == plain, outcome


class Waits:
    """Is copied once it may be."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def __deepcopy__(self, known: Any) -> str:
        self.may.wait(30)
        return "copied"


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_what_another_thread_may_read_stays(way: str, library: bool, tmp_path: Path) -> None:
    """A checkpoint that is written beside the training: it would find a part of the state."""
    make, plan = WAYS[way]
    there: list[int] = []
    copies: list[Any] = []
    beside: list[Any] = []

    def between(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        there.append(sum(each.nbytes() for each in living_storages("cpu")))
        if step == 1:
            kept = {"first": Waits(), **optimizer.state_dict()}
            own = threading.Thread(target=lambda: copies.append(copy.deepcopy(kept)))
            thread = threading.Thread(target=copy.deepcopy, args=(kept,)) if library else own
            thread.start()
            beside[:] = kept["first"], thread
        if step == 4:
            waits, thread = beside
            waits.may.set()
            thread.join()
            return numbers(copies)
        return []

    def loop(steps: int) -> list[str]:
        copies.clear()
        return training(make, between)(steps)

    plain = seeded(loop, STEPS)
    before, there[:] = list(there), []
    computed, outcome = enforced(loop, plan(), tmp_path, STEPS)
    assert computed == plain, outcome
    assert before[1] - there[1] > 2 * 4 * WIDE * WIDE * 0.9
    assert before[3] - there[3] < 4 * WIDE * WIDE


def test_without_anybody_to_tell_it_is_a_plain_dict_and_what_others_hold_stays_theirs() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))])
    for each in optimizer.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    optimizer.step()
    looks: list[int] = []
    held = optimizer.state[optimizer.param_groups[0]["params"][1]]
    stand_in(optimizer, lambda: None, lambda: looks.append(1))
    given = optimizer.state_dict()["state"]
    looks.clear()  # of `state_dict` itself
    assert [type(each) for each in given.values()] == [HandedOut, dict]
    assert given[1] is held
    assert not looks
    assert given[0]["step"] == 1
    assert looks
    of_another_kind = type(given[0])({"step": 7})
    assert of_another_kind == {"step": 7}
