"""The tiers on a late device: no order of the streams shows a race, and without any one of their rules some order does."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from memopt.enforcers.tiers import accelerator, disk, host, swapped
from memopt.enforcers.tiers import staging as carrier
from tests.late.late_device import Race
from tests.late.late_orders import every_order
from tests.late.late_training import Kit, Layer, random_layers, training
from tests.support.mutants import mutant

PLANS = 30
"""As many plans have a thousand orders each in `benchmarks.late_schedules`."""


def plans(count: int = PLANS) -> list[int]:
    """Numbers of random plans that swap something."""
    swapping = (n for n in range(1000) if any(layer.tier for layer in random_layers(n)))
    return [next(swapping) for _ in range(count)]


ACROSS_DEVICES = (
    Layer(device=0, home=0, saver=1, readers=(0,), nbytes=1000, tier="host"),
    Layer(device=1, home=0, saver=0, readers=(0,), nbytes=1000, tier="", waits=(0,), prefetches=(0,)),
)
"""The first is waited for on one stream of its device, and brought back from another, by the second device's thread."""


@pytest.mark.parametrize("plan", [*plans(), ACROSS_DEVICES])
def test_no_order_of_the_streams_shows_a_race(plan: int | tuple[Layer, ...], tmp_path: Path) -> None:
    with training(layers_of(plan), tmp_path) as steps:
        for seed in range(20):
            steps.step(seed)
        assert steps.swapped_out >= 20


def layers_of(plan: int | tuple[Layer, ...]) -> tuple[Layer, ...]:
    return random_layers(plan) if isinstance(plan, int) else plan


SMALL = {
    "one stream": Layer(device=0, home=0, saver=0, readers=(0,), nbytes=100, tier="host"),
    "dropped at once": Layer(
        device=0, home=0, saver=0, readers=(0,), nbytes=100, tier="host", waits_back=(0,)
    ),
    "brought back early": Layer(
        device=0, home=0, saver=0, readers=(0,), nbytes=100, tier="host", waits_back=(0,), prefetches=(0,)
    ),
    "read on another stream": Layer(device=0, home=0, saver=0, readers=(1,), nbytes=100, tier="host"),
    "saved on another stream": Layer(device=0, home=0, saver=1, readers=(0,), nbytes=100, tier="host"),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_a_small_plan(name: str, tmp_path: Path) -> None:
    orders = 0
    for world in every_order(2000):
        with training((SMALL[name],), tmp_path, world=world) as steps:
            steps.step(0)
        orders += 1
    assert 10 < orders < 2000, "all of them"


def test_the_plans_have_what_is_asked_of_them() -> None:
    every = [random_layers(plan) for plan in plans()]
    layers = [layer for plan in every for layer in plan]
    assert {frozenset(layer.tier for layer in plan if layer.tier) for plan in every} == {
        frozenset(tiers) for tiers in ({"host"}, {"disk"}, {"host", "disk"})
    }
    assert sum(len({layer.device for layer in plan}) == 2 for plan in every) >= 5
    assert sum(len({layer.home for layer in plan}) == 2 for plan in every) >= 10
    assert sum(layer.saver != layer.home for layer in layers) >= 10
    assert sum(layer.home not in layer.readers for layer in layers) >= 10
    assert sum(layer.again for layer in layers) >= 10
    assert sum(layer.dropped for layer in layers) >= 3


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_device_that_no_tensor_is_on_gets_no_context(tier: str, tmp_path: Path) -> None:
    """Each takes half a gigabyte of it: of another rank's GPU, mostly."""
    layer = Layer(device=1, home=0, saver=0, readers=(0, 0), nbytes=5000, tier=tier, prefetches=(0,))
    with training((layer, layer), tmp_path) as steps:
        for seed in range(5):
            steps.step(seed)
        contexts = steps.world.contexts
    assert contexts == {1}


@pytest.mark.parametrize("plan", [1, 12, 25])
def test_out_of_memory_at_any_allocation_of_a_prefetch(plan: int, tmp_path: Path) -> None:
    with training(random_layers(plan), tmp_path) as steps:
        for fails_at in range(8):
            for seed in range(5):
                steps.step(seed, fails_at=fails_at)


@pytest.mark.parametrize("plan", [1, 12, 25])
def test_where_little_can_be_pinned_the_rest_is_kept(plan: int, tmp_path: Path) -> None:
    for most_bytes in (0, 1024, 6000, 20_000):
        with training(random_layers(plan), tmp_path) as steps:
            for device in steps.devices:
                device.most_pinned_bytes = most_bytes
            for seed in range(5):
                steps.step(seed)


def test_what_has_been_used_goes_at_once_however_far_the_host_runs_ahead(tmp_path: Path) -> None:
    layer = Layer(device=0, home=0, saver=0, readers=(0,), nbytes=1000, tier="host")
    with training((layer,), tmp_path) as steps:
        steps.world.haste = 0.0
        storage = steps.devices[0].memory.allocate(1000)
        address = storage.access.address
        swapped = steps.swapper.swap_out(0, storage)
        del storage
        steps.swapper.wait_for_all()
        assert swapped.source() is None, "it has left"
        again = swapped.get()
        assert again.access.address == address, "the stream may use its memory again"
        watched = weakref.ref(again)
        swapped.served()
        del again
        assert watched() is None


@dataclass(frozen=True, slots=True)
class Rule:
    """What keeps the tiers right, and its source without it."""

    name: str
    module: ModuleType
    old: str
    new: str = ""


RULES = (
    Rule("copies out wait for the kernels before them", host, "self._out.wait_event(ready)"),
    Rule("copies in wait for the memory's former owner", host, "self._in.wait_event(ready)"),
    Rule("copies in wait for the copy out", host, "self._in.wait_event(ticket.copied)"),
    Rule("who asks waits for the arrival", host, "stream.wait_event(self.copy.event)"),
    Rule("another stream's use of an arrival is told", host, "self.accelerator.uses(self.target, stream)"),
    Rule("another stream's use of a source is told", host, "self._users.may_use(ticket.source)"),
    Rule(
        "all streams' uses are told",
        accelerator,
        "for stream in self._seen:",
        "for stream in self._seen[-1:]:",
    ),
    Rule("dropping at once has the stream wait", host, "self._users.current().wait_event(ticket.copied)"),
    Rule(
        "a source is kept until its copy has ended",
        host,
        "while self._leaving and self._leaving[0].event.query():",
        "while self._leaving:",
    ),
    Rule(
        "a target is kept until its copy has ended",
        host,
        "while self._coming and self._coming[0].event.query():",
        "while self._coming:",
    ),
    Rule("a copy out is kept in mind", host, "self._leaving.append(_InFlight(ticket.copied, ticket))"),
    Rule("a copy in keeps its target", host, "_InFlight(event, ticket, into)", "_InFlight(event, ticket)"),
    Rule("a copy in keeps its place", host, "_InFlight(event, ticket, into)", "_InFlight(event, None, into)"),
    Rule(
        "a source that is taken back is kept, too",
        host,
        "            return ticket.source\n",
        "            source, ticket.source = ticket.source, None\n            return source\n",
    ),
    Rule("a store closes after its copies", host, "copy.event.synchronize()", "pass"),
    Rule(
        "disk: a piece waits for the kernels before it",
        carrier,
        "self._stream.wait_event(piece.ready)",
        "pass",
    ),
    Rule("disk: the thread waits for its copy", carrier, "        done.synchronize()", "        pass"),
    Rule(
        "disk: another stream's use of a source is told",
        disk,
        "self._users.may_use(storage)",
        "pass",
    ),
    Rule(
        "disk: another stream's use of an arrival is told",
        disk,
        "self.accelerator.uses(self.target, self.accelerator.current_stream())",
    ),
    Rule("disk: who asks waits for the arrival", disk, "self.done.result(timeout)"),
    Rule("disk: the moment of asking is noted", disk, "self._users.current().record_event()", "None"),
    Rule("who asks for a swapped tensor waits", swapped, "arrival.result()", "pass"),
    Rule(
        "every stream waits, not the first alone",
        swapped,
        "arrival, storage = self._arrival, self._storage",
        "arrival, storage = self._arrival, self._storage; self._arrival = None",
    ),
    Rule(
        "out of memory in a prefetch is no end", swapped, "except RuntimeError:", "except ZeroDivisionError:"
    ),
    Rule("what was taken back stays", swapped, "self._home = True"),
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_without_any_one_rule_some_order_fails(rule: Rule, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, Race, ValueError, torch.OutOfMemoryError)):
        look_for_a_failure(rule, tmp_path)


def look_for_a_failure(rule: Rule, folder: Path) -> None:
    kit = kit_without(rule)
    for seed in range(20):
        for plan in (ACROSS_DEVICES, *plans()):
            with training(layers_of(plan), folder, kit=kit, seed=seed) as steps:
                for turn in range(3):
                    steps.step(100 * seed + turn, fails_at=turn if rule.module is swapped else -1)


def kit_without(rule: Rule) -> Kit:
    changed: Any = mutant(rule.module, rule.old, rule.new or "pass")
    if rule.module is carrier:
        return Kit(disk=with_changed(disk, OnDevice=changed.OnDevice), carrier=changed)
    if rule.module is accelerator:
        return Kit(host=with_changed(host, Users=changed.Users), disk=with_changed(disk, Users=changed.Users))
    return Kit(**{rule.module.__name__.rpartition(".")[2]: changed})


def with_changed(module: ModuleType, **names: Any) -> ModuleType:
    made = mutant(module, "from __future__ import annotations", "from __future__ import annotations")
    vars(made).update(names)
    return made
