"""The host tier of a GPU: bytes of whole storages in one pinned arena, moved by two side streams.

Rules (each broken once by somebody, with silently wrong gradients or no overlap at all):

* what a copy reads or fills is kept alive here until its event has come to pass, or until the stream that its memory belongs to
  waits for that event; no `record_stream` for the copy, which would delay the reuse of the memory;
* a script may compute on several streams: every stream that asks for a storage waits for its arrival, and the allocator is told of
  those that the memory does not belong to (that is what `record_stream` is for), when it asks, and when a storage is let go of;
* the compute stream is taken *before* the side stream is entered; inside, "current" would be the side stream itself;
* nothing is pinned on the fly: the plan knows the bytes, so the arena is made once; growing is the exception, and counted.

Every block of pinned memory stays with its ticket until the last copy out of it has ended, or is written by a copy that waits for
that one, so a place is never written while it is read. What has run on a GPU: docs/status.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from memopt.enforcers.tiers.accelerator import Accelerator, Event, Stream, Users, most_bytes, row_of
from memopt.enforcers.tiers.swap import FreeSpace, SwapFailed
from memopt.units import format_bytes

if TYPE_CHECKING:
    import torch

    from memopt.enforcers.tiers.feedback import HowLong

BLOCK_BYTES = 512
GROW_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class _Segment:
    row: torch.Tensor
    space: FreeSpace


class PinnedArena:
    """Pinned memory of a size that the plan knows, handed out by first fit; grows, by `grown_bytes` in all, if it must.

    Never beyond `most_bytes()`, what the host has left at that moment: a process that passes it is killed. A first piece that would is
    made smaller, and what finds no place there is refused.
    """

    def __init__(
        self, accelerator: Accelerator, nbytes: int, most_bytes: Callable[[], int | None] = most_bytes
    ) -> None:
        self._accelerator = accelerator
        self._most_bytes = most_bytes
        self._segments: list[_Segment] = []
        self._freed: deque[tuple[_Segment, int, int]] = deque()
        self._full: SwapFailed | None = None
        self.grown_bytes = 0
        if nbytes and (within := self._within(nbytes)):
            self._add(within)

    @property
    def size_bytes(self) -> int:
        return sum(segment.space.size_bytes for segment in self._segments)

    @property
    def free_bytes(self) -> int:
        self._collect()
        return sum(segment.space.free_bytes for segment in self._segments)

    def take(self, nbytes: int) -> tuple[_Segment, int, torch.Tensor]:
        """(segment, offset, row) of `nbytes`. Raises `SwapFailed` where there is no place and none can be added."""
        self._collect()
        room = _room(nbytes)
        for segment in self._segments:
            offset = segment.space.take(room)
            if offset is not None:
                return segment, offset, segment.row[offset : offset + nbytes]
        segment = self._grow(room)
        offset = segment.space.take(room)
        assert offset == 0
        return segment, offset, segment.row[:nbytes]

    def give(self, segment: _Segment, offset: int, nbytes: int) -> None:
        """Release a place; from any thread, at any moment."""
        self._freed.append((segment, offset, _room(nbytes)))

    def close(self) -> None:
        for segment in self._segments:
            self._accelerator.unpin(segment.row)
        self._segments.clear()

    def _collect(self) -> None:
        while self._freed:
            segment, offset, room = self._freed.popleft()
            segment.space.give(offset, room)

    def _grow(self, room: int) -> _Segment:
        """A segment for `room` bytes and more. Where that was refused once it is not tried again: it takes long."""
        if self._full is not None:
            raise self._full.again()
        added = max(room, self._within(max(room, GROW_BYTES)))
        try:
            if added > self._within(added):
                raise SwapFailed(
                    f"the host has no room for {format_bytes(room)} more of swapped tensors",
                    why=f"{format_bytes(self.size_bytes)} are pinned already, and {format_bytes(self._within(added))} more may be",
                    try_="memopt advise --deny swap-host, or a larger budget",
                )
            segment = self._add(added)
        except SwapFailed as error:
            self._full = error.again()
            raise
        self.grown_bytes += added
        return segment

    def _within(self, nbytes: int) -> int:
        """`nbytes`, or what the host has of it."""
        most = self._most_bytes()
        return nbytes if most is None else min(nbytes, most // BLOCK_BYTES * BLOCK_BYTES)

    def _add(self, nbytes: int) -> _Segment:
        size = _room(nbytes)
        segment = _Segment(self._accelerator.pinned(size), FreeSpace(size))
        self._segments.append(segment)
        return segment


def _room(nbytes: int) -> int:
    return max(1, -(-nbytes // BLOCK_BYTES)) * BLOCK_BYTES


class _Pinned:
    """A place in the arena, free again when the last ticket that has it is gone."""

    __slots__ = ("_taken", "read", "row")

    def __init__(self, arena: PinnedArena, nbytes: int) -> None:
        self._taken: tuple[PinnedArena, _Segment, int, int] | None = None
        segment, offset, self.row = arena.take(nbytes)
        self._taken = arena, segment, offset, nbytes
        self.read: Event | None = None
        """The last copy out of it."""

    def __del__(self) -> None:
        if self._taken is not None:
            arena, segment, offset, nbytes = self._taken
            arena.give(segment, offset, nbytes)


class HostTicket:
    """Bytes that were given to the host tier."""

    __slots__ = ("copied", "device", "nbytes", "place", "source", "taken")

    def __init__(self, storage: torch.UntypedStorage, arena: PinnedArena, over: HostTicket | None) -> None:
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self.source: torch.UntypedStorage | None = storage
        """Until the copy has ended, whoever else has it."""
        self.taken = False
        fits = over is not None and over.nbytes == self.nbytes
        self.place: _Pinned = over.place if over is not None and fits else _Pinned(arena, self.nbytes)
        self.copied: Event | None = None


@dataclass(slots=True, eq=False)
class _InFlight:
    """A copy, and everything that must outlive it."""

    event: Event
    ticket: HostTicket
    target: torch.UntypedStorage | None = None


@dataclass(slots=True)
class Arrival:
    """A copy to the device that was started."""

    copy: _InFlight
    target: torch.UntypedStorage = field(repr=False)
    accelerator: Accelerator = field(repr=False)
    made_on: Stream = field(repr=False)
    """The stream whose memory the target is."""
    is_timed: bool = False
    """Is somebody going to ask how long the first stream waited?"""
    asked: tuple[Event, Event] | None = field(default=None, repr=False)
    """Points of that stream, before and after it waited."""

    def result(self, timeout: float | None = None) -> None:
        """From here on this thread's compute stream has the bytes, and only this one; the host does not wait."""
        with self.accelerator.here():
            stream = self.accelerator.current_stream()
            before = self.accelerator.timed(stream) if self.is_timed and self.asked is None else None
            stream.wait_event(self.copy.event)
            if before is not None:
                self.asked = before, self.accelerator.timed(stream)
            if stream != self.made_on:
                self.accelerator.uses(self.target, stream)
        self.copy.target = (
            None  # whose memory it is now comes after the copy, however far the host runs ahead
        )

    def finish(self) -> None:
        """Let the host wait: the bytes are there for every stream."""
        self.copy.event.synchronize()

    def how_long(self) -> HowLong:
        """Of what the first stream waited, to be asked later; it holds none of the bytes."""
        return partial(_elapsed_ms, self.accelerator, self.asked)


def _first_ended(copies: deque[_InFlight]) -> _InFlight | None:
    """The first of them, if it has; asked without the lock."""
    try:
        first = copies[0]
    except IndexError:
        return None
    return first if first.event.query() else None


def _elapsed_ms(accelerator: Accelerator, asked: tuple[Event, Event] | None) -> float | None:
    return None if asked is None else accelerator.elapsed_ms(*asked)


class HostStore:
    """Pinned host memory as a place to swap to, `at_once_bytes` of it from the beginning: what the plan has there at once.

    Raises `SwapFailed` where nothing can be pinned. A write that finds no place raises it too, and others go on.
    """

    def __init__(self, at_once_bytes: int, *, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        with accelerator.here():
            self._arena = PinnedArena(accelerator, at_once_bytes)
            self._out = accelerator.new_stream()
            self._in = accelerator.new_stream()
        self._leaving: deque[_InFlight] = deque()
        self._coming: deque[_InFlight] = deque()
        self._users = Users(accelerator)
        self._lock = threading.RLock()
        """Backward has a thread for each device."""
        self.failure: SwapFailed | None = None
        self.written_bytes = 0
        self.read_bytes = 0

    @property
    def grown_bytes(self) -> int:
        """Bytes that had to be pinned beyond the plan."""
        return self._arena.grown_bytes

    @property
    def frees_nothing(self) -> str:
        return ""

    def write_async(self, storage: torch.UntypedStorage, over: HostTicket | None = None) -> HostTicket:
        """Start to copy `storage` out, after what this thread has queued so far. It must not be written to meanwhile.
        `over`: what lies there is asked for no more; its place is written over, as soon as the last copy out of it has ended."""
        with self._lock, self._accelerator.here():
            self._collect()
            try:
                ticket = HostTicket(storage, self._arena, over)
            except SwapFailed as error:
                self.failure = self.failure or error.again()
                raise
            ready = self._users.current().record_event()
            with self._accelerator.on(self._out):
                self._out.wait_event(ready)
                if ticket.place.read is not None:
                    self._out.wait_event(ticket.place.read)
                ticket.place.row.copy_(row_of(storage), non_blocking=True)
                ticket.copied = self._out.record_event()
            self._leaving.append(_InFlight(ticket.copied, ticket))
            self.written_bytes += ticket.nbytes
            return ticket

    def read_async(self, ticket: HostTicket, into: torch.UntypedStorage) -> Arrival:
        """Start to copy the bytes of `ticket` into `into`, which was made on this thread's stream; again and again, if wanted."""
        if into.nbytes() < ticket.nbytes:
            raise ValueError(f"{ticket.nbytes} bytes do not fit into a storage of {into.nbytes()}")
        return self._read(ticket, 0, ticket.nbytes, into)

    def read_part(self, ticket: HostTicket, begin: int, into: torch.UntypedStorage) -> Arrival:
        """Start to fill all of `into`, which was made on this thread's stream, with the bytes of `ticket` from `begin` on."""
        if begin + into.nbytes() > ticket.nbytes:
            raise ValueError(f"{into.nbytes()} bytes from {begin} on are no part of {ticket.nbytes}")
        return self._read(ticket, begin, into.nbytes(), into)

    def _read(self, ticket: HostTicket, begin: int, nbytes: int, into: torch.UntypedStorage) -> Arrival:
        with self._lock, self._accelerator.here():
            self._collect()
            if ticket.taken or ticket.copied is None:
                raise ValueError("this ticket was taken back")
            made_on = self._users.current()
            ready = made_on.record_event()
            with self._accelerator.on(self._in):
                self._in.wait_event(ready)
                self._in.wait_event(ticket.copied)
                here, there = row_of(into), ticket.place.row
                if into.nbytes() != nbytes:
                    here = here[:nbytes]
                if ticket.nbytes != nbytes:
                    there = there[begin : begin + nbytes]
                here.copy_(there, non_blocking=True)
                event = ticket.place.read = self._in.record_event()
            copy = _InFlight(event, ticket, into)
            self._coming.append(copy)
            self.read_bytes += nbytes
            return Arrival(copy, into, self._accelerator, made_on)

    def wait(self, ticket: HostTicket) -> None:
        """Let this thread's stream wait for the copy, and drop the storage now: what follows in the stream may reuse its memory."""
        with self._lock, self._accelerator.here():
            if ticket.copied is not None and ticket.source is not None and not ticket.taken:
                self._users.current().wait_event(ticket.copied)
                self._let_go(ticket)
            self._collect()

    def collect(self) -> int:
        """Drop the storages whose copies have ended; their bytes. Never blocks. Asked after each op: it does little where none has."""
        dropped_bytes = 0
        if self._leaving and (ended := _first_ended(self._leaving)) is not None:
            with self._lock, self._accelerator.here():
                dropped_bytes = self._collect_leaving(ended)
        if self._coming and (ended := _first_ended(self._coming)) is not None:
            with self._lock, self._accelerator.here():
                self._collect_coming(ended)
        return dropped_bytes

    def _collect(self) -> None:
        self._collect_leaving()
        self._collect_coming()

    def _collect_leaving(self, ended: _InFlight | None = None) -> int:
        """`ended`: has been asked already."""
        dropped_bytes = 0
        while self._leaving and (self._leaving[0] is ended or self._leaving[0].event.query()):
            ticket = self._leaving.popleft().ticket
            if ticket.source is not None:
                dropped_bytes += 0 if ticket.taken else ticket.nbytes
            self._let_go(ticket)
        return dropped_bytes

    def _collect_coming(self, ended: _InFlight | None = None) -> None:
        while self._coming and (self._coming[0] is ended or self._coming[0].event.query()):
            self._coming.popleft()

    def _let_go(self, ticket: HostTicket) -> None:
        if ticket.source is not None and not ticket.taken:
            self._users.may_use(ticket.source)
        ticket.source = None

    def take_back(self, ticket: HostTicket) -> torch.UntypedStorage | None:
        """The storage, if the ticket still holds it; None once it has been dropped. The copy, which still reads it, keeps it too."""
        with self._lock:
            if ticket.taken or ticket.source is None:
                return None
            ticket.taken = True
            return ticket.source

    def close(self) -> None:
        """Let every copy end, then give the pinned memory back."""
        with self._accelerator.here():
            for copy in (*self._leaving, *self._coming):
                copy.event.synchronize()
            self.collect()
            self._arena.close()
