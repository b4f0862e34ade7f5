"""A pretended accelerator that is late: streams run in any order that their events allow, and every race is found.

Work is queued with the byte ranges that it reads and writes. Vector clocks say of each access which accesses of other streams come
before it in every legal order; two that touch the same bytes, one of them writing, and are not ordered, are a `Race`, whether or not
this run would have shown wrong bytes. And it would: copies move their bytes when a seeded scheduler lets their stream go on, freed
memory goes back to the stream that it belongs to at once and is poisoned there, as a caching allocator's next owner would.

Orders that the host learns of (an event that was asked for, or waited for) count for all that is queued from then on.
Other names: happens-before race detection (FastTrack, PLDI 2009), for streams in the place of threads.
"""

from __future__ import annotations

import bisect
import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from memopt.enforcers.tiers.swap import SwapFailed

STREAMS = 24
"""More than any test makes."""
POISON = 0xEE


class Race(BaseException):
    """Two accesses of the same bytes that no event orders."""


@dataclass(slots=True)
class Cell:
    """Who touched a stretch of bytes: (stream, tick) of the last write, tick of the last read by stream since."""

    end: int
    writer: int
    tick: int
    what: str
    readers: dict[int, tuple[int, str]]

    def copied(self, end: int) -> Cell:
        return Cell(end, self.writer, self.tick, self.what, dict(self.readers))


class Shadow:
    """What was last done to each byte."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: dict[int, Cell] = {}

    def touch(self, begin: int, end: int, stream: int, clock: list[int], what: str, *, write: bool) -> None:
        """An access of `stream`, whose `clock` is given; raises `Race`."""
        if begin >= end:
            return
        self._split(begin)
        self._split(end)
        first = bisect.bisect_left(self._starts, begin)
        last = bisect.bisect_left(self._starts, end)
        for start in self._starts[first:last]:
            self._check(self._cells[start], clock, what, write=write)
        if write:
            for start in self._starts[first:last]:
                del self._cells[start]
            self._starts[first:last] = [begin]
            self._cells[begin] = Cell(end, stream, clock[stream], what, {})
            return
        at = begin
        for start in self._starts[first:last]:
            if start > at:
                self._add(at, Cell(start, stream, 0, "", {}))
            at = self._cells[start].end
        if at < end:
            self._add(at, Cell(end, stream, 0, "", {}))
        for start in self._starts[first : bisect.bisect_left(self._starts, end)]:
            self._cells[start].readers[stream] = clock[stream], what

    def _check(self, cell: Cell, clock: list[int], what: str, *, write: bool) -> None:
        if cell.tick > clock[cell.writer]:
            raise Race(f"{what} is not ordered after {cell.what}")
        for stream, (tick, reader) in cell.readers.items() if write else ():
            if tick > clock[stream]:
                raise Race(f"{what} is not ordered after {reader}")

    def _split(self, at: int) -> None:
        place = bisect.bisect_right(self._starts, at) - 1
        if place < 0:
            return
        cell = self._cells[self._starts[place]]
        if self._starts[place] < at < cell.end:
            self._add(at, cell.copied(cell.end))
            cell.end = at

    def _add(self, start: int, cell: Cell) -> None:
        bisect.insort(self._starts, start)
        self._cells[start] = cell


class LateEvent:
    """A point in a stream's work, which the host learns of by asking or waiting."""

    __slots__ = ("clock", "passed", "world")

    def __init__(self, world: World, clock: list[int]) -> None:
        self.world, self.clock, self.passed = world, clock, False

    def query(self) -> bool:
        return self.world.asked(self)

    def synchronize(self) -> None:
        self.world.waited_for(self)


@dataclass(slots=True)
class Mark:
    """The point itself, in a stream's work."""

    event: LateEvent

    def __call__(self) -> None:
        self.event.passed = True


class LateStream:
    """A queue of work."""

    __slots__ = ("clock", "name", "number", "work", "world")

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.number = len(world.streams)
        assert self.number < STREAMS
        self.clock = [0] * STREAMS
        self.work: deque[LateEvent | Callable[[], None]] = deque()
        world.streams.append(self)
        world.ranks.insert(world.random.randrange(len(world.ranks) + 1), self)

    def record_event(self) -> LateEvent:
        return self.world.record(self)

    def wait_event(self, event: LateEvent) -> None:
        self.world.wait(self, event)

    def __repr__(self) -> str:
        return self.name


@dataclass(slots=True)
class Access:
    """Bytes from `address` on, and where they really are."""

    address: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.address + len(self.memory)


class World:
    """All streams of all devices, the host's knowledge, and the order in which things happen. Any thread may call."""

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.streams: list[LateStream] = []
        self.ranks: list[LateStream] = []
        self.shadow = Shadow()
        self.host = [0] * STREAMS
        self.freed: deque[Callable[[], None]] = deque()
        """What was let go of, from any thread at any moment; looked at before anything is queued."""
        self.here = threading.local()
        self.contexts: set[int] = set()
        """Devices on which torch has made a context, since a thread had them when something was asked of another."""
        self.capturing = False
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Another order from here on."""
        self.random = random.Random(seed)
        self.haste = self.random.choice((0.0, 0.2, 0.6, 0.95))
        """How likely a stream goes on when the host does something."""
        self.random.shuffle(self.ranks)

    # --- what is queued

    def queue(
        self,
        stream: LateStream,
        act: Callable[[], None],
        what: str,
        *,
        reads: tuple[Access, ...] = (),
        writes: tuple[Access, ...] = (),
    ) -> None:
        """`act` when its turn comes."""
        with self.lock:
            self.seen_by_host(stream)
            self.note(stream.number, stream.clock, what, reads, writes)
            stream.work.append(act)
            self.go_on()

    def note(
        self, stream: int, clock: list[int], what: str, reads: tuple[Access, ...], writes: tuple[Access, ...]
    ) -> None:
        """The accesses of one piece of work of `stream`, at `clock`."""
        clock[stream] += 1
        for access in reads:
            self.shadow.touch(access.address, access.end, stream, clock, what, write=False)
        for access in writes:
            self.shadow.touch(access.address, access.end, stream, clock, what, write=True)

    def seen_by_host(self, stream: LateStream) -> None:
        """The host queues something: what it knows has come to pass comes before."""
        assert not self.capturing, "a graph is being captured"
        while self.freed:
            self.freed.popleft()()
        merge(stream.clock, self.host)

    def record(self, stream: LateStream) -> LateEvent:
        with self.lock:
            self.seen_by_host(stream)
            event = LateEvent(self, stream.clock.copy())
            stream.work.append(Mark(event))
            self.go_on()
            return event

    def wait(self, stream: LateStream, event: LateEvent) -> None:
        with self.lock:
            self.seen_by_host(stream)
            merge(stream.clock, event.clock)
            stream.work.append(event)
            self.go_on()

    # --- what happens

    def asked(self, event: LateEvent) -> bool:
        with self.lock:
            assert not self.capturing, "a graph is being captured"
            self.go_on()
            if event.passed:
                merge(self.host, event.clock)
            return event.passed

    def waited_for(self, event: LateEvent) -> None:
        with self.lock:
            assert not self.capturing, "a graph is being captured"
            while not event.passed:
                assert self.turn(), "waiting for ever"
            merge(self.host, event.clock)

    def go_on(self) -> None:
        """Let some streams do some of their work, or none."""
        while self.random.random() < self.haste and self.turn():
            pass

    def turn(self) -> bool:
        """One stream does its next thing, mostly the same as before; False: nothing can be done."""
        if self.random.random() < 0.2:
            self.random.shuffle(self.ranks)
        return any(self.step(stream) for stream in self.ranks)

    def step(self, stream: LateStream) -> bool:
        if not stream.work:
            return False
        first = stream.work[0]
        if isinstance(first, LateEvent):
            if not first.passed:
                return False
        else:
            first()
        stream.work.popleft()
        return True

    def finish(self, stream: LateStream) -> None:
        """All that is queued on `stream`, and what that needs."""
        with self.lock:
            while stream.work:
                assert self.step(stream) or self.turn(), "waiting for ever"

    def run(self) -> None:
        """Everything, and the host waits for it."""
        with self.lock:
            while self.freed:
                self.freed.popleft()()
            while self.turn():
                pass
            assert not any(stream.work for stream in self.streams), "streams wait for each other"
            for stream in self.streams:
                merge(self.host, stream.clock)


def merge(clock: list[int], other: list[int]) -> None:
    clock[:] = map(max, clock, other)


class LateDevice:
    """One accelerator of a `World`. Its memory is a few Python buffers; `pinned` rows are the host's."""

    def __init__(self, world: World, index: int = 0, memory_bytes: int = 1 << 20) -> None:
        self.world = world
        self.device = torch.device("cuda", index)
        self.default = LateStream(world, f"gpu{index} compute")
        self.memory = Memory(self, memory_bytes)
        self.most_pinned_bytes = 1 << 40
        self.pinned_rows: dict[int, Row] = {}

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        here = self.world.here
        before = getattr(here, "index", 0)
        here.index = self.device.index
        try:
            yield
        finally:
            here.index = before

    def _asked(self) -> None:
        """As torch does for its streams and events: the thread's device is set back, which makes a context there."""
        self.world.contexts.add(getattr(self.world.here, "index", 0))

    def current_stream(self) -> LateStream:
        assert self.entered is None, "the current stream is asked for inside the side stream"
        current: LateStream = getattr(self.world.here, "current", {}).get(self.device, self.default)
        return current

    def compute_on(self, stream: LateStream) -> None:
        """This thread does, from now on."""
        here = self.world.here
        here.current = {**getattr(here, "current", {}), self.device: stream}

    def new_stream(self) -> LateStream:
        self._asked()
        return LateStream(self.world, f"gpu{self.device.index} side {len(self.world.streams)}")

    @property
    def entered(self) -> LateStream | None:
        return getattr(self.world.here, "entered", None)

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        self._asked()
        self.world.here.entered = stream
        try:
            yield
        finally:
            self.world.here.entered = None

    def timed(self, stream: LateStream) -> LateEvent:
        return stream.record_event()

    def elapsed_ms(self, start: LateEvent, end: LateEvent) -> float | None:
        """Any time, or none yet: what is late here has no clock."""
        passed = start.query() and end.query()
        return self.world.random.choice((0.0, 1.0, 50.0)) if passed else None

    def uses(self, storage: LateStorage, stream: LateStream) -> None:
        self._asked()
        with self.world.lock:
            assert storage.device == self.device
            if stream is not storage.block.home and stream not in storage.block.uses:
                storage.block.uses.append(stream)

    def pinned(self, nbytes: int) -> Row:
        self._asked()
        if sum(row.nbytes for row in self.pinned_rows.values()) + nbytes > self.most_pinned_bytes:
            raise SwapFailed("host memory cannot be pinned")
        row = Row(self, buffer_of(nbytes))
        self.pinned_rows[row.access.address] = row
        return row

    def unpin(self, row: Row) -> None:
        self._asked()
        del self.pinned_rows[row.access.address]
        with self.world.lock:  # the host takes it: every copy must be known to have ended
            access = row.access
            self.world.shadow.touch(
                access.address, access.end, STREAMS - 1, self.world.host, "unpinning", write=True
            )


def buffer_of(nbytes: int) -> Access:
    array = np.zeros(nbytes, np.uint8)
    return Access(array.ctypes.data, array.data)


class Row:
    """Of bytes, as much of a tensor as the tiers use."""

    __slots__ = ("access", "device")

    def __init__(self, device: LateDevice, access: Access) -> None:
        self.device, self.access = device, access

    @property
    def nbytes(self) -> int:
        return len(self.access.memory)

    def __getitem__(self, part: slice) -> Row:
        start, stop, _ = part.indices(self.nbytes)
        return Row(self.device, Access(self.access.address + start, self.access.memory[start:stop]))

    def data_ptr(self) -> int:
        return self.access.address

    def numpy(self) -> np.ndarray:
        return np.frombuffer(self.access.memory, np.uint8)

    def copy_(self, source: Row, non_blocking: bool = False) -> None:
        stream = self.device.entered
        assert non_blocking, "a blocking copy"
        assert stream is not None, "a copy on the compute stream"
        into, of = self.access.memory, source.access.memory
        assert len(into) == len(of)
        self.device.world.queue(
            stream,
            lambda: into.__setitem__(slice(None), of),
            f"a copy on {stream}",
            reads=(source.access,),
            writes=(self.access,),
        )


@dataclass(slots=True, eq=False)
class Block:
    access: Access
    home: LateStream
    uses: list[LateStream] = field(default_factory=list)
    known: list[int] = field(default_factory=lambda: [0] * STREAMS)
    """What the host knows of when it gives the block away again."""


class LateStorage:
    """As much of an `UntypedStorage` as the tiers use."""

    __slots__ = ("__weakref__", "_nbytes", "block", "memory")

    def __init__(self, memory: Memory, block: Block, nbytes: int) -> None:
        self.memory, self.block, self._nbytes = memory, block, nbytes

    @property
    def device(self) -> torch.device:
        return self.memory.device.device

    def nbytes(self) -> int:
        return self._nbytes

    @property
    def access(self) -> Access:
        access = self.block.access
        return Access(access.address, access.memory[: self._nbytes])

    def row(self) -> Row:
        return Row(self.memory.device, self.access)

    def __del__(self) -> None:
        memory, block = self.memory, self.block
        memory.device.world.freed.append(lambda: memory.free(block))


class Memory:
    """A caching allocator: freed blocks go to the stream that they were made on, at once where nobody else has used them."""

    def __init__(self, device: LateDevice, nbytes: int) -> None:
        self.device = device
        self._whole = buffer_of(nbytes)
        self._begun = 0
        self._pools: dict[tuple[int, int], list[Block]] = {}
        self.fails_at = -1
        """How many more allocations succeed before one does not; negative: all."""

    def allocate(self, nbytes: int) -> LateStorage:
        """On this thread's stream."""
        world = self.device.world
        with world.lock:
            home = self.device.current_stream()
            world.seen_by_host(home)
            self.fails_at -= 1
            if self.fails_at == -1:
                raise torch.OutOfMemoryError("the late device is out of memory, as a test wants it")
            room = max(256, 1 << (nbytes - 1).bit_length()) if nbytes else 256
            pool = self._pools.get((home.number, room))
            while not pool and self._begun + room > len(self._whole.memory) and world.turn():
                pool = self._pools.get((home.number, room))  # the allocator waits for what is under way
            block = pool.pop() if pool else self._cut(room, home)
            merge(world.host, block.known)
            return LateStorage(self, block, nbytes)

    def _cut(self, room: int, home: LateStream) -> Block:
        begin, end = self._begun, self._begun + room
        if end > len(self._whole.memory):
            raise torch.OutOfMemoryError("the late device is out of memory")
        self._begun = end
        return Block(Access(self._whole.address + begin, self._whole.memory[begin:end]), home)

    def free(self, block: Block) -> None:
        world, home = self.device.world, block.home
        used = [world.record(stream) for stream in block.uses]
        merge(home.clock, world.host)
        clock = home.clock.copy()
        for event in used:
            merge(clock, event.clock)
        world.note(home.number, clock, f"the next owner of memory of {home}", (), (block.access,))
        home.clock[home.number] = clock[home.number]
        memory = block.access.memory

        def poison() -> None:
            memory[:] = bytes((POISON,)) * len(memory)

        if not used:
            home.work.append(poison)
            self._again(block)
            return
        block.uses, block.known = [], clock
        world.ranks.append(Lane(world, home, used, poison, lambda: self._again(block)))  # type: ignore[arg-type]

    def _again(self, block: Block) -> None:
        self._pools.setdefault((block.home.number, len(block.access.memory)), []).append(block)


class Lane:
    """A freed block that other streams have used: its owner gets it when they are done, and poisons it first."""

    def __init__(
        self,
        world: World,
        home: LateStream,
        used: list[LateEvent],
        poison: Callable[[], None],
        give: Callable[[], None],
    ) -> None:
        own = world.record(home)
        self.work: deque[LateEvent | Callable[[], None]] = deque([own, *used])

        def end() -> None:
            poison()
            give()
            world.ranks.remove(self)  # type: ignore[arg-type]

        self.work.append(end)
