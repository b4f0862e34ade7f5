"""The guard beside a plan whose weights leave: they make room when they come back, and larger iterations than the profiled one are held."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from memopt.enforcers.guarding.live_bytes import Live
from memopt.enforcers.tiers.disk import DiskStore
from memopt.enforcers.verify.digests import digest
from memopt.enforcers.weights.emptied import EmptiedStorage
from memopt.plan import Plan
from memopt.trace import Trace
from memopt.workspaces import workspaces_of
from tests.enforcers.weights.test_frozen_away import LAYERS, WIDTH, LoRA
from tests.enforcers.weights.test_streamed import streaming
from tests.enforcers.weights.test_trained_away import Layer, all_away
from tests.support.enforced import enforced, plan_of, recorded, seeded, state_digests

STEPS = 8
SMALL, LARGE = 512, 1536


def layers(steps: int, *, layer: Callable[[], nn.Module], grows: bool = False) -> list[str]:
    """Rows are three times as many in later steps, if it `grows`."""
    model = nn.Sequential(*[layer() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(steps):
        loss = model(torch.randn(LARGE if grows and step > 1 else SMALL, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return found + state_digests(model)


def streams(trace: Trace) -> Plan:
    return streaming(trace)


def one_by_one(trace: Trace) -> Plan:
    return streaming(trace, ahead=False)


def sends_between(trace: Trace) -> Plan:
    return plan_of(trace, all_away)


@pytest.mark.parametrize(("layer", "make"), [(LoRA, streams), (LoRA, one_by_one), (Layer, sends_between)])
def test_larger_iterations_are_held(
    layer: Callable[[], nn.Module], make: Callable[[Trace], Plan], tmp_path: Path
) -> None:
    plan = make(recorded(functools.partial(layers, layer=layer), tmp_path))
    budget = plan.predicted_peak_bytes + 4 * LARGE * WIDTH * 4
    plan = msgspec.structs.replace(plan, budget_bytes=budget)
    loop = functools.partial(layers, layer=layer, grows=True)

    def peak_bytes(holds_bytes: int) -> int:
        computed, outcome = enforced(loop, plan, tmp_path, STEPS, measure=True, holds_bytes=holds_bytes)
        assert computed == seeded(loop, STEPS)
        assert outcome.measured_peak_bytes is not None
        return outcome.measured_peak_bytes

    assert peak_bytes(budget) <= budget + 64  # what the loss leaves
    assert peak_bytes(0) > budget


class Room:
    """Tells what it was told."""

    def __init__(self, *, has: bool) -> None:
        self.has, self.told = has, list[int]()

    def has_room(self, size_bytes: int) -> bool:
        return self.has

    def make_room(self, size_bytes: int) -> None:
        self.told.append(size_bytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        self.told.append(-storage.nbytes())

    def looked_at(self, size_bytes: int) -> None:
        raise AssertionError("of weights nobody tells so")


@pytest.mark.parametrize("has", [True, False])
def test_none_comes_ahead_where_there_is_no_room(has: bool, tmp_path: Path) -> None:
    """Saved tensors would have to leave for it, before anybody has asked."""
    room, tensor = Room(has=has), torch.arange(1024.0, device="cpu")
    expected = tensor.clone()
    with contextlib.closing(DiskStore(tmp_path)) as tier:
        emptied = EmptiedStorage(tier, tensor.untyped_storage(), None, noted=True, room=room)
        emptied.wait_until_away()
        emptied.prefetch()
        assert (emptied.storage.nbytes() == 4096) is has
        emptied.get()
        assert room.told == [0, 4096, -4096]
        assert torch.equal(tensor, expected)


def test_what_weights_take_while_they_are_here_is_no_workspace(tmp_path: Path) -> None:
    trace = recorded(functools.partial(layers, layer=LoRA), tmp_path)
    assert streaming(trace).workspace_calls == workspaces_of(trace)


def test_bytes_of_a_storage_that_is_emptied_and_filled() -> None:
    live = Live("cpu")
    tensor = torch.empty(1000, device="cpu")
    storage = tensor.untyped_storage()
    live.met(storage)
    storage.resize_(0)
    live.resized(storage)
    assert live.now() == 0
    storage.resize_(8000)
    live.resized(storage)
    assert live.now() == live.most == 8000
    del tensor, storage
    assert live.now() == 0


def test_bytes_of_a_storage_that_was_empty_when_it_was_looked_for() -> None:
    live, storage = Live("cpu"), torch.empty(0, device="cpu").untyped_storage()
    storage.resize_(4000)
    live.resized(storage)
    assert live.now() == 4000
