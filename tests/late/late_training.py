"""A training step in the small, on the late device: what a script, autograd and the engine ask of the tiers, in their order.

The script alone is free of races, whatever the streams do; so a race, or a byte that is not what was saved, is the tiers'.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memopt.enforcers.tiers import disk, host, swapped
from memopt.enforcers.tiers import per_device as tiers
from memopt.enforcers.tiers import staging as carrier
from tests.late.late_device import LateDevice, LateEvent, LateStorage, LateStream, World

PIECE_BYTES = 4096
"""Of the disk tier: storages have several pieces."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A saved tensor, and what the plan does with it. Streams by number, of its device."""

    device: int
    home: int
    """The stream that it is made on."""
    saver: int
    """The one that the op runs on which saves it."""
    readers: tuple[int, ...]
    """Of backward: one for each slot."""
    nbytes: int
    tier: str
    """Empty: kept."""
    waits: tuple[int, ...] = ()
    """Layers that must be away when this one is saved."""
    waits_back: tuple[int, ...] = ()
    """The same when it is asked for."""
    prefetches: tuple[int, ...] = ()
    again: bool = False
    """Unpacked twice, as under `retain_graph`."""
    dropped: bool = False
    """Its graph goes without being asked."""


@dataclass(frozen=True, slots=True)
class Kit:
    """The code under test; a mutant has one of the modules changed."""

    host: ModuleType = host
    disk: ModuleType = disk
    swapped: ModuleType = swapped
    carrier: ModuleType = carrier


def random_layers(seed: int) -> tuple[Layer, ...]:
    """Of one to two devices with one to two compute streams each."""
    draw = random.Random(seed)
    devices, streams, count = draw.choice((1, 1, 2)), draw.choice((1, 2)), draw.randint(3, 7)
    tiers_ = draw.choice((("host",), ("disk",), ("host", "disk", ""), ("host", "host", "")))
    layers = []
    for number in range(count):
        later = range(number + 1, count)
        home = draw.randrange(streams)
        layers.append(
            Layer(
                device=draw.randrange(devices),
                home=home,
                saver=home if draw.random() < 0.6 else draw.randrange(streams),
                readers=tuple(
                    home if draw.random() < 0.5 else draw.randrange(streams)
                    for _ in range(draw.choice((1, 1, 2)))
                ),
                nbytes=draw.choice((1, 200, 256, 1000, 1024, 5000, 9000)),
                tier=draw.choice(tiers_),
                waits=tuple(n for n in range(number) if draw.random() < 0.3),
                waits_back=tuple(n for n in range(number) if draw.random() < 0.2),
                prefetches=tuple(n for n in range(number) if draw.random() < 0.4),
                again=draw.random() < 0.2,
                dropped=bool(later) and draw.random() < 0.1,
            )
        )
    return tuple(layers)


class Training:
    """Steps of `layers` under a swapper of the `kit`, each in another order of the streams."""

    def __init__(
        self, layers: tuple[Layer, ...], folder: Path, *, kit: Kit | None = None, world: World
    ) -> None:
        self.layers = layers
        self.world = world
        self.devices = [LateDevice(self.world, n) for n in range(1 + max(each.device for each in layers))]
        self.streams = [
            [device.default, LateStream(self.world, f"gpu{n} compute b")]
            for n, device in enumerate(self.devices)
        ]
        self._kit = kit or Kit()
        self._folder = folder
        self.tiers = {"host": tiers.PerDevice(self._host), "disk": tiers.PerDevice(self._disk)}
        self.swapper: Any = self._kit.swapped.Swapper(
            self.tiers, {n: layer.tier for n, layer in enumerate(layers) if layer.tier}
        )
        self._backward = [ThreadPoolExecutor(1) for _ in self.devices]
        self._looks: list[tuple[list[bytes], bytes, str]] = []
        self._saved: list[LateEvent] = []
        """For each layer, the point after the op that saves it; the last moves on with backward."""
        self._asked_for_memory = -1
        self._step = 0
        self.swapped_out = 0

    def _host(self, device: torch.device) -> Any:
        at_once = sum(layer.nbytes + 512 for layer in self.layers)
        return self._kit.host.HostStore(at_once, accelerator=self.devices[device.index])

    def _disk(self, device: torch.device) -> Any:
        return self._kit.disk.DiskStore(self._folder, threads=2, accelerator=self.devices[device.index])

    def step(self, seed: int, *, fails_at: int = -1) -> None:
        """Forward, backward, and a look at every byte that was read. `fails_at`: the allocation for which there is no memory."""
        self.world.seed(seed)
        self._step += 1
        self._asked_for_memory = fails_at
        handles = self._forward()
        for number, layer in enumerate(self.layers):
            for event in self._saved[number : number + 2]:  # its memory goes back to this stream in backward
                self.streams[layer.device][layer.home].wait_event(event)
        for number in reversed(range(len(self.layers))):
            self._in_thread(number, lambda n=number: self._use(n, handles))  # type: ignore[misc]
        handles.clear()
        self.swapper.new_iteration()
        self._meet()
        if self.world.random.random() < 0.5:
            self.end_of_step()

    def end_of_step(self) -> None:
        """The host waits for all, and what was read is compared."""
        self.world.run()
        for seen, wanted, what in self._looks:
            assert seen == [wanted], f"{what}: other bytes"
        self._looks.clear()

    def close(self) -> None:
        for tier in self.tiers.values():
            tier.close()
        self.end_of_step()
        assert not any(device.pinned_rows for device in self.devices), "pinned memory is left"

    def stop(self) -> None:
        """Leave no thread behind, whatever has failed."""
        for tier in self.tiers.values():
            with contextlib.suppress(Exception):
                tier.close()
        for thread in self._backward:
            thread.shutdown()

    # --- the parts of a step

    def _forward(self) -> dict[int, list[Any]]:
        handles: dict[int, list[Any]] = {}
        self._saved.clear()
        before: LateStorage | None = None
        last = self.streams[0][0]
        for number, layer in enumerate(self.layers):
            device, streams = self.devices[layer.device], self.streams[layer.device]
            home, saver = streams[layer.home], streams[layer.saver]
            device.compute_on(home)
            self._scratch(device, home)
            storage = device.memory.allocate(layer.nbytes)
            self._fill(home, storage, self._content(number))
            self._after(saver, home)
            self._look(saver, storage, number, "the op that saves it")
            if before is not None:
                reader = (
                    saver if before.device == device.device else last
                )  # a copy between devices is the source's
                reader.wait_event(self._saved[-1])
                self._look(reader, before, number - 1, "the op that saves the next")
                self._after(saver, reader)
            device.compute_on(saver)
            handles[number] = self._pack(number, storage)
            self._look(saver, storage, number, "an op after that")
            self._saved.append(saver.record_event())
            before, last = storage, saver
            del storage
            self.swapper.collect()
        return handles

    def _pack(self, number: int, storage: LateStorage) -> list[Any]:
        layer = self.layers[number]
        if layer.waits:
            self.swapper.wait_until_away(layer.waits)
        contents = []
        for reader in layer.readers:
            content = self.swapper.swap_out(number, storage) if layer.tier else None
            self.swapped_out += content is not None
            contents.append(storage if content is None else content)
            if reader != layer.home:  # what any script has to do whose backward runs on another stream
                self.devices[layer.device].uses(storage, self.streams[layer.device][reader])
        return contents

    def _use(self, number: int, handles: dict[int, list[Any]]) -> None:
        layer = self.layers[number]
        device = self.devices[layer.device]
        contents = handles.pop(number)
        for reader, content in zip(layer.readers, contents, strict=True):
            stream = self.streams[layer.device][reader]
            device.compute_on(stream)
            stream.wait_event(self._saved[number])
            stream.wait_event(self._saved[-1])
            self.swapper.collect()
            if layer.waits_back:
                self.swapper.wait_until_away(layer.waits_back)
            self.swapper.prefetch(list(layer.prefetches))
            self._scratch(device, stream)
            self._saved[-1] = stream.record_event()  # backward is one chain, as its ops are
            for turn in range(0 if layer.dropped else 1 + layer.again):
                tensor = content if isinstance(content, LateStorage) else content.get()
                self._look(stream, tensor, number, "backward")
                if turn == 0 and tensor is not content:
                    content.served()
                del tensor

    def _in_thread(self, number: int, act: Callable[[], None]) -> None:
        self._backward[self.layers[number].device].submit(act).result()

    def _meet(self) -> None:
        """The step is over: each compute stream waits for what every other has queued."""
        everyone = [stream for streams in self.streams for stream in streams]
        events = [stream.record_event() for stream in everyone]
        for stream in everyone:
            for event in events:
                stream.wait_event(event)

    def _after(self, stream: LateStream, other: LateStream) -> None:
        if stream is not other:
            stream.wait_event(other.record_event())

    # --- one by one

    def filled(self, number: int) -> LateStorage:
        """The storage of a layer, with its bytes."""
        device = self.devices[self.layers[number].device]
        storage = device.memory.allocate(self.layers[number].nbytes)
        self._fill(device.current_stream(), storage, self._content(number))
        return storage

    def look_at(self, storage: LateStorage, number: int) -> None:
        """It is read, on this thread's stream."""
        self._look(self.devices[self.layers[number].device].current_stream(), storage, number, "a test")

    # --- kernels

    def _content(self, number: int) -> bytes:
        return bytes(((self._step * 37 + number * 11) % 200 + 1,)) * self.layers[number].nbytes

    def _fill(self, stream: LateStream, storage: LateStorage, content: bytes) -> None:
        memory = storage.access.memory
        self.world.queue(
            stream,
            lambda: memory.__setitem__(slice(None), content),
            f"a kernel on {stream}",
            writes=(storage.access,),
        )

    def _look(self, stream: LateStream, storage: LateStorage, number: int, where: str) -> None:
        seen: list[bytes] = []
        memory = storage.access.memory
        what = f"layer {number}, read on {stream} by {where}"
        self.world.queue(stream, lambda: seen.append(bytes(memory)), what, reads=(storage.access,))
        self._looks.append((seen, self._content(number), what))

    def _scratch(self, device: LateDevice, stream: LateStream) -> None:
        """A temporary, in memory that has just been let go of."""
        nbytes = self.world.random.choice((200, 1000, 5000, 9000))
        self._fill(stream, device.memory.allocate(nbytes), b"\xaa" * nbytes)

    # --- what the tiers ask torch for

    def allocate(self, nbytes: int, device: torch.device) -> LateStorage:
        """In the place of `UntypedStorage`."""
        self._asked_for_memory -= 1
        if self._asked_for_memory == -1:
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        return self.devices[device.index].memory.allocate(nbytes)


@contextlib.contextmanager
def training(
    layers: tuple[Layer, ...],
    folder: Path,
    *,
    kit: Kit | None = None,
    seed: int = 0,
    world: World | None = None,
) -> Iterator[Training]:
    """A `Training` for which the tiers' rows and storages are the late device's."""
    kit = kit or Kit()
    made = Training(layers, folder, kit=kit, world=world or World(seed))
    with replaced(kit, made):
        try:
            yield made
            made.close()
        finally:
            made.stop()


@contextlib.contextmanager
def replaced(kit: Kit, made: Training) -> Iterator[None]:
    """The names that are torch's."""
    names: list[tuple[Any, str, Any]] = [
        (kit.host, "row_of", LateStorage.row),
        (kit.carrier, "row_of", LateStorage.row),
        (kit.swapped, "UntypedStorage", made.allocate),
        (kit.disk, "PIECE_BYTES", PIECE_BYTES),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    for module, name, new in names:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)
