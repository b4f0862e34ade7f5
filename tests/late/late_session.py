"""A whole run under a plan with the CPU's memory as a late device's: real ops compute at once, the tiers' copies come late.

What torch computes counts as work of one compute stream, with the storages that it reads and writes; the copies that the tiers queue
move their bytes when the scheduler lets them, at the latest when the compute stream waits for them. Memory that the CPU's allocator
frees is poisoned by it (glibc's M_PERTURB) and soon somebody else's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memopt.enforcers.capturing import Capturing
from memopt.enforcers.session import ApplySession, Options
from memopt.enforcers.tiers import accelerator, host
from memopt.enforcers.tiers import staging as carrier
from memopt.enforcers.tiers.swapped import Swapper
from memopt.instrument import one_stream
from memopt.instrument.ops import kind_of
from memopt.outcome import Outcome
from memopt.plan import Plan
from tests.late.late_device import Access, LateDevice, LateEvent, LateStream, Row, World
from tests.support.enforced import Loop, seeded

_UNTOUCHED = ("aten.empty", "aten.set_", "aten._reshape_alias", "aten.detach", "aten.resize_")
"""Ops that give or name memory, and neither read nor write it."""


class Compute(LateStream):
    """Which torch's ops run on: it is never late, and memory that the host frees is free at once."""

    def wait_event(self, event: LateEvent) -> None:
        super().wait_event(event)
        self.world.finish(self)


class LateCpu(LateDevice):
    """An accelerator whose memory is the CPU's."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.default = Compute(world, "compute")
        self.device = torch.device("cpu")
        self.uses_told = 0

    def uses(self, storage: torch.UntypedStorage, stream: LateStream) -> None:  # type: ignore[override]
        assert isinstance(stream, Compute)
        self.uses_told += 1

    def another(self) -> Compute:
        """One more stream that a script can compute on (`compute_on`). Memory goes from one to the other at once: a script that uses it
        must have its streams wait for each other before it lets go of anything."""
        return Compute(self.world, f"compute {len(self.world.streams)}")

    def row_of(self, storage: torch.UntypedStorage) -> Row:
        """By its address alone, as a device has it: this keeps nothing alive."""
        return Row(self, _at(storage.data_ptr(), storage.nbytes()))


def _at(address: int, nbytes: int) -> Access:
    return Access(address, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B"))


def _whole(tensor: Tensor) -> Access | None:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return None
    return _at(storage.data_ptr(), storage.nbytes())


class Kernels(TorchDispatchMode):
    """Notes what each op reads and writes, as work of the compute stream, which has everything before it behind it."""

    def __init__(self, device: LateCpu) -> None:
        super().__init__()
        self._device = device
        self.noted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        if self._device.entered is not None or kind.is_view or kind.name.startswith(_UNTOUCHED):
            return func(*args, **kwargs)
        stream, world = self._device.current_stream(), self._device.world
        world.finish(stream)
        reads = _accesses((args, kwargs))
        out = func(*args, **kwargs)
        written = [args[n] for n in kind.writes if n < len(args)]
        if not world.capturing:
            self.noted += 1
            with world.lock:
                world.seen_by_host(stream)
                world.note(stream.number, stream.clock, kind.name, reads, _accesses((written, out)))
        return out


def _accesses(tree: Any) -> tuple[Access, ...]:
    found = (_whole(thing) for thing in tree_iter(tree) if isinstance(thing, Tensor))
    return tuple(access for access in found if access is not None)


@contextlib.contextmanager
def late_cpu(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[tuple[LateCpu, Kernels]]:
    """Tiers opened in here are on a late device, and what torch computes is noted."""
    device = LateCpu(World(seed))
    monkeypatch.setattr(accelerator, "accelerator_of", lambda _: device)
    monkeypatch.setattr(one_stream, "current_stream", lambda _: device.current_stream())
    for module in (host, carrier):
        monkeypatch.setattr(module, "row_of", device.row_of)
    monkeypatch.setattr(Swapper, "wait_for_all", lambda self: None)  # which a GPU's runs do not
    monkeypatch.setattr(Capturing, "now", lambda self: device.world.capturing)
    monkeypatch.setattr(Capturing, "why_keep", lambda self: "captured" if device.world.capturing else "")
    libc = ctypes.CDLL(None)
    libc.mallopt(-6, 0xEE)  # M_PERTURB
    try:
        with Kernels(device) as kernels:
            yield device, kernels
    finally:
        libc.mallopt(-6, 0)


def run_late(
    loop: Loop,
    plan: Plan,
    folder: Path,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    *,
    told: Callable[[LateCpu], None] = lambda device: None,
    stays_open: bool = False,
) -> tuple[list[str], Outcome, LateCpu, Kernels]:
    """What the loop computes under `plan`. `told` is given the device before it begins. `stays_open`: the plan has a tier that whoever looks
    at optimizer state may need until the process ends."""
    with late_cpu(monkeypatch, seed) as (device, kernels):
        told(device)
        session = ApplySession(plan, Options(swap_dir=folder, measure=False))
        session.install()
        try:
            computed = seeded(loop, steps)
        finally:
            outcome = session.finished()
    assert outcome is not None
    assert stays_open or not device.pinned_rows
    return computed, outcome, device, kernels
