"""How a piece of a storage gets into and out of the page-aligned buffer of one of the disk tier's threads."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memopt.enforcers.tiers.accelerator import Accelerator, Event, row_of
from memopt.enforcers.tiers.swap_file import PAGE_BYTES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` of a storage from `start`."""

    start: int
    nbytes: int
    ready: Event | None = None
    """On an accelerator, the point from which the storage may be read or filled."""
    further: int = 0
    """Where a part is read: so many bytes further on the source has it."""

    @property
    def room_bytes(self) -> int:
        """In whole pages."""
        return -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES


class Carrier(Protocol):
    """One thread's buffer. Each call returns when its bytes are there."""

    view: memoryview

    def take(self, source: torch.UntypedStorage, piece: Piece) -> None:
        """The `piece` of `source` into the buffer."""

    def put(self, target: torch.UntypedStorage, piece: Piece) -> None:
        """What the buffer begins with to its place in `target`."""

    def copy(self, source: torch.UntypedStorage, target: torch.UntypedStorage, piece: Piece) -> None:
        """Without the buffer."""

    def close(self) -> None:
        """Give the buffer up, before the thread ends."""


class InMemory:
    """For storages in the host's memory, which nothing has to wait for."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def take(self, source: torch.UntypedStorage, piece: Piece) -> None:
        ctypes.memmove(self._address, source.data_ptr() + piece.start, piece.nbytes)

    def put(self, target: torch.UntypedStorage, piece: Piece) -> None:
        ctypes.memmove(target.data_ptr() + piece.start, self._address, piece.nbytes)

    def copy(self, source: torch.UntypedStorage, target: torch.UntypedStorage, piece: Piece) -> None:
        begin = piece.start + piece.further
        ctypes.memmove(target.data_ptr() + piece.start, source.data_ptr() + begin, piece.nbytes)

    def close(self) -> None:
        """It goes with its thread."""


class OnDevice:
    """For storages of an accelerator: a pinned buffer and a stream of its own, on whose copies this thread waits.

    So no copy outlives the call, and the storage may go as soon as its owner learns of it: nothing needs `record_stream`.
    """

    def __init__(self, nbytes: int, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream()
        self._pinned = accelerator.pinned(nbytes + PAGE_BYTES)
        begin = -self._pinned.data_ptr() % PAGE_BYTES
        self._row = self._pinned[begin : begin + nbytes]
        self.view = self._row.numpy().data

    def take(self, source: torch.UntypedStorage, piece: Piece) -> None:
        self._copy(self._row[: piece.nbytes], _part(source, piece), piece)

    def put(self, target: torch.UntypedStorage, piece: Piece) -> None:
        self._copy(_part(target, piece), self._row[: piece.nbytes], piece)

    def copy(self, source: torch.UntypedStorage, target: torch.UntypedStorage, piece: Piece) -> None:
        self._copy(_part(target, piece), _part(source, piece, piece.further), piece)

    def close(self) -> None:
        self._accelerator.unpin(self._pinned)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, piece: Piece) -> None:
        with self._accelerator.on(self._stream):
            if piece.ready is not None:
                self._stream.wait_event(piece.ready)
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()


def _part(storage: torch.UntypedStorage, piece: Piece, further: int = 0) -> torch.Tensor:
    begin = piece.start + further
    return row_of(storage)[begin : begin + piece.nbytes]
