"""How a piece of a storage gets into and out of the page-aligned buffer of one of the disk tier's threads."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Protocol

from memopt.enforcers.accelerator import Accelerator, Event, row_of
from memopt.enforcers.swap_file import PAGE_BYTES

if TYPE_CHECKING:
    import torch


class Carrier(Protocol):
    """One thread's buffer. Each call returns when its bytes are there; `ready` is what the storage's memory has to wait for."""

    view: memoryview

    def take(self, source: torch.UntypedStorage, start: int, nbytes: int, ready: Event | None) -> None:
        """`nbytes` of `source` from `start` into the buffer."""

    def put(self, target: torch.UntypedStorage, start: int, nbytes: int, ready: Event | None) -> None:
        """The buffer's first `nbytes` into `target` from `start`."""

    def copy(
        self,
        source: torch.UntypedStorage,
        target: torch.UntypedStorage,
        start: int,
        nbytes: int,
        ready: Event | None,
    ) -> None:
        """Without the buffer, to the same place."""


class InMemory:
    """For storages in the host's memory, which nothing has to wait for."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def take(self, source: torch.UntypedStorage, start: int, nbytes: int, ready: Event | None) -> None:
        ctypes.memmove(self._address, source.data_ptr() + start, nbytes)

    def put(self, target: torch.UntypedStorage, start: int, nbytes: int, ready: Event | None) -> None:
        ctypes.memmove(target.data_ptr() + start, self._address, nbytes)

    def copy(
        self,
        source: torch.UntypedStorage,
        target: torch.UntypedStorage,
        start: int,
        nbytes: int,
        ready: Event | None,
    ) -> None:
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, nbytes)


class OnDevice:
    """For storages of an accelerator: a pinned buffer and a stream of its own, on whose copies this thread waits.

    So no copy outlives the call, and the storage may go as soon as its owner learns of it: nothing needs `record_stream`.
    """

    def __init__(self, nbytes: int, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream()
        pinned = accelerator.pinned(nbytes + PAGE_BYTES)
        self._pinned = pinned
        begin = -pinned.data_ptr() % PAGE_BYTES
        self._row = pinned[begin : begin + nbytes]
        self.view = self._row.numpy().data

    def take(self, source: torch.UntypedStorage, start: int, nbytes: int, ready: Event | None) -> None:
        self._copy(self._row[:nbytes], row_of(source)[start : start + nbytes], ready)

    def put(self, target: torch.UntypedStorage, start: int, nbytes: int, ready: Event | None) -> None:
        self._copy(row_of(target)[start : start + nbytes], self._row[:nbytes], ready)

    def copy(
        self,
        source: torch.UntypedStorage,
        target: torch.UntypedStorage,
        start: int,
        nbytes: int,
        ready: Event | None,
    ) -> None:
        rows = row_of(target), row_of(source)
        self._copy(rows[0][start : start + nbytes], rows[1][start : start + nbytes], ready)

    def close(self) -> None:
        """Before the thread ends."""
        self._accelerator.unpin(self._pinned)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, ready: Event | None) -> None:
        with self._accelerator.on(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()
