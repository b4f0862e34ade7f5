"""Tickets for storages that a swap file takes, and the place in it that each gets."""

from __future__ import annotations

import enum
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from memopt.enforcers.tiers.swap import FreeSpace, SwapFailed
from memopt.enforcers.tiers.swap_file import PAGE_BYTES, SwapFile

if TYPE_CHECKING:
    import torch

GROW_BYTES = 64 << 20
"""The file grows by no less, where the disk has so much: one call for many small storages."""


def whole_pages(nbytes: int) -> int:
    """What `nbytes` take in the file."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class State(enum.Enum):
    """Of a ticket."""

    HELD = "not written yet, being written, or failed: the storage has the only copy"
    WRITTEN = "the bytes are in the file; the storage goes at the next `collect`"
    OFF = "taken back"


class Ticket:
    """Bytes that were given to the disk tier. Their place in the file is free again when the ticket is gone."""

    __slots__ = ("__weakref__", "_freed", "device", "nbytes", "offset", "source", "state", "written")

    def __init__(self, storage: torch.UntypedStorage, freed: deque[tuple[int, int]]) -> None:
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self.source: torch.UntypedStorage | None = storage
        self.state = State.HELD
        self.offset: int | None = None
        self.written: Future[None] = Future()
        self._freed = freed

    @property
    def room_bytes(self) -> int:
        return whole_pages(self.nbytes)

    @property
    def taken(self) -> bool:
        """Whether the storage was taken back: then the ticket is worth nothing any more."""
        return self.state is State.OFF

    def __del__(self) -> None:  # any thread, any moment: only note it, the next placement collects
        if self.offset is not None:
            self._freed.append((self.offset, self.room_bytes))


class Places:
    """Which stretch of one swap file a ticket has; any thread may ask. Raises `SwapFailed` where the disk is full."""

    def __init__(self, file: SwapFile) -> None:
        self._file = file
        self._space = FreeSpace()
        self._lock = threading.Lock()
        self.freed: deque[tuple[int, int]] = deque()
        """(offset, bytes) of places that are given back: noted without a lock, at any moment."""

    def reserve(self, nbytes: int) -> None:
        """Have the disk give that much at once; without it the file is closed."""
        try:
            self._file.grow(whole_pages(nbytes))
        except SwapFailed:
            self._file.close()
            raise
        self._space.grow(whole_pages(nbytes))

    def place(self, ticket: Ticket) -> int:
        """Of `ticket`: found by the first of its pieces that asks."""
        with self._lock:
            if ticket.offset is not None:
                return ticket.offset
            while self.freed:
                self._space.give(*self.freed.popleft())
            offset = self._space.take(ticket.room_bytes)
            if offset is None:
                self._grow(ticket.room_bytes)
                offset = self._space.take(ticket.room_bytes)
                assert offset is not None
            ticket.offset = offset
            return offset

    def _grow(self, room_bytes: int) -> None:
        missing = self._space.missing_bytes(room_bytes)
        generous = -(-missing // GROW_BYTES) * GROW_BYTES
        try:
            self._file.grow(generous)
        except SwapFailed:
            if generous == missing:
                raise
            self._file.grow(missing)
            generous = missing
        self._space.grow(generous)
