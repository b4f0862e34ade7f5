"""Which store a storage goes to, and when that is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.enforcers.lookup import tables_of
from memopt.enforcers.session import ApplySession, Options
from memopt.enforcers.tiers import accelerator, planned
from memopt.enforcers.tiers.host import BLOCK_BYTES
from memopt.enforcers.tiers.per_device import PerDevice, offload_tier
from memopt.enforcers.tiers.swap import SwapFailed
from memopt.enforcers.tiers.swapped import Swapper
from memopt.estimators.simulator.decision import Decision
from tests.enforcers.tiers.test_swap_in_time import deep_net
from tests.support.enforced import plan_of, recorded, seeded


class Ticket:
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.source: torch.UntypedStorage | None = storage
        self.device = storage.device


class Store:
    """Keeps what it is given."""

    failure: SwapFailed | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[str] = []

    def write_async(self, storage: torch.UntypedStorage, over: Any = None) -> Ticket:
        assert storage.device == self.device
        self.calls.append("write")
        return Ticket(storage)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            assert all(arg.device == self.device for arg in args)
            self.calls.append(name)
            return 0

        return call


def test_each_device_has_its_own_store_from_its_first_write_on() -> None:
    opened: list[Store] = []

    def open_store(device: torch.device) -> Store:
        opened.append(Store(device))
        return opened[-1]

    tier = PerDevice(open_store)
    tier.collect()
    assert opened == []
    here, there = torch.UntypedStorage(8), torch.UntypedStorage(8, device="meta")
    tickets = [tier.write_async(storage) for storage in (here, there, here)]
    assert [store.device.type for store in opened] == ["cpu", "meta"]
    for ticket in tickets[:2]:
        tier.wait(ticket)
        tier.take_back(ticket)
        tier.read_async(ticket, ticket.source)
    tier.collect()
    tier.close()
    each = ["wait", "take_back", "read_async", "collect", "close"]
    assert [store.calls for store in opened] == [["write", "write", *each], ["write", *each]]


def test_a_device_that_has_no_store_is_asked_once_and_the_others_have_theirs() -> None:
    asked: list[str] = []

    def open_store(device: torch.device) -> Store:
        asked.append(device.type)
        if device.type == "meta":
            raise RuntimeError("no queue could be made")
        return Store(device)

    tier = PerDevice(open_store)
    tier.write_async(torch.UntypedStorage(8))
    assert tier.failure is None
    for _ in range(2):
        with pytest.raises(SwapFailed, match="no tier could be opened for meta"):
            tier.write_async(torch.UntypedStorage(8, device="meta"))
    assert asked == ["cpu", "meta"]
    assert tier.failure is not None
    swapper = Swapper({"host": tier}, {0: "host"})
    assert swapper.swap_out(0, torch.UntypedStorage(8, device="meta")) is None
    assert swapper.failures() == ["no tier could be opened for meta (no queue could be made)"]


def test_what_is_offloaded_from_a_cpu_goes_to_the_disk(tmp_path: Path) -> None:
    tier = offload_tier(tmp_path)
    tier.write_async(torch.UntypedStorage(4096))
    assert [store.folder for store in tier.stores] == [tmp_path]  # type: ignore[attr-defined]
    tier.close()


def test_nothing_asks_for_a_device_before_the_first_storage_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recorded(deep_net, tmp_path)
    to_host = Decision(kind="swap", tier="host")
    plan = plan_of(trace, lambda problem: dict.fromkeys(problem.candidates, to_host))
    asked: list[torch.device] = []

    def accelerator_of(device: torch.device) -> accelerator.Accelerator:
        asked.append(device)
        raise SwapFailed("no such device", why="a test says so")

    monkeypatch.setattr(accelerator, "accelerator_of", accelerator_of)
    session = ApplySession(plan, Options(swap_dir=tmp_path, measure=False))
    session.install()
    assert asked == [], "torch is imported, and which device this rank is to use is not known"
    seeded(deep_net, 3)
    outcome = session.finished()
    assert asked == [torch.device("cpu")], "the device of the storage, once"
    assert outcome is not None
    assert outcome.actions.done == 0
    assert "no such device (a test says so); what could not be copied was kept" in outcome.notes


def micro_batches(steps: int) -> list[str]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(4):
            model(torch.randn(1024, 64)).square().mean().backward()
        optimizer.step()
    return []


def test_the_plan_says_how_much_is_on_the_host_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recorded(micro_batches, tmp_path)
    to_host = Decision(kind="swap", tier="host")
    plan = plan_of(trace, lambda problem: dict.fromkeys(problem.candidates, to_host))
    in_all = sum(action.size_bytes for action in plan.actions)
    assert len(plan.actions) % 4 == 0
    assert plan.host_bytes == in_all // 4, "each graph is gone before the next is made"
    assert plan_of(trace, lambda _: {}).host_bytes == 0
    pinned: list[int] = []
    monkeypatch.setattr(planned, "host_tier", lambda at_once: pinned.append(at_once) or Store)
    planned.swapper_of(plan, tables_of(plan), tmp_path)
    assert pinned == [plan.host_bytes + BLOCK_BYTES * len(plan.actions)]
