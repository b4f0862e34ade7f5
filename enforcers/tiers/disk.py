"""The disk tier: bytes of whole storages in one swap file, moved by a few threads through page-aligned buffers of fixed size.

Storages are cut into buffer-sized pieces, so that copying one piece overlaps with the disk's work on another, and one large
storage uses all threads. Reads go before writes: somebody is waiting for them. A read of a ticket whose write is not done is a
copy from the storage that the ticket still holds. Memory of its own: `threads * PIECE_BYTES`, pinned where the storages are an
accelerator's: its bytes go through the threads' buffers too (FlashNeuron, FAST 2021, spares them that way, which takes a driver).

Storages are dropped by the thread that calls into the store, never by a worker: allocator events and finalizers stay where the
script's own are. Call `collect()` now and then; every other method does it too.

A forked child (a DataLoader worker) closes its copy of the file and can do nothing else with a store that it inherited.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.enforcers.tiers.accelerator import Users
from memopt.enforcers.tiers.staging import Carrier, InMemory, OnDevice, Piece
from memopt.enforcers.tiers.swap import Pending, SwapFailed, without_frames
from memopt.enforcers.tiers.swap_file import PAGE_BYTES, SwapFile, is_in_memory, remove_leftovers
from memopt.enforcers.tiers.swap_places import Places, State, Ticket

if TYPE_CHECKING:
    import torch

    from memopt.enforcers.tiers.accelerator import Accelerator, Event

PIECE_BYTES = 8 << 20
_READ, _WRITE, _STOP = 0, 1, 2

_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class _Transfer:
    """All pieces of one storage on their way; the last one to finish completes it."""

    ticket: Ticket
    memory: torch.UntypedStorage | None
    done: Future[None]
    nbytes: int
    begin: int
    """Where in the ticket's bytes those that move begin."""
    pieces: int
    ready: Event | None
    error: BaseException | None = None

    def piece(self, start: int) -> Piece:
        """The one that begins there."""
        return Piece(start, min(PIECE_BYTES, self.nbytes - start), self.ready, self.begin)


@dataclass(slots=True, eq=False)
class _Arrival:
    """Bytes on their way to an accelerator's memory."""

    done: Future[None]
    target: torch.UntypedStorage
    accelerator: Accelerator

    def result(self, timeout: float | None = None) -> None:
        self.done.result(timeout)
        with self.accelerator.here():
            self.accelerator.uses(self.target, self.accelerator.current_stream())


class DiskStore:
    """A swap file in `folder` and the threads that serve it; `reserve_bytes` are asked of the disk at once. Storages are those of
    the host, or of `accelerator`.

    Raises `SwapFailed` when there can be no such file there. Where later something fails, `failure` says what; from then on
    `write_async` raises it, tickets that failed hold their storage, and what was written before can still be read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        threads: int = 4,
        reserve_bytes: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.leftover_bytes = remove_leftovers(self.folder)
        self.failure: SwapFailed | None = None
        self.written_bytes = 0
        self.read_bytes = 0
        self.in_memory = is_in_memory(self.folder)
        self._threads = threads
        self._accelerator = accelerator
        self._users = None if accelerator is None else Users(accelerator)
        self._pid = os.getpid()
        self._file = SwapFile(self.folder)
        self._places = Places(self._file)
        self._safe: deque[Ticket] = deque()
        self._lock = threading.Lock()
        self._queue: queue.PriorityQueue[tuple[int, int, _Transfer | None, int]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._workers: list[threading.Thread] = []
        _stores.add(self)
        if reserve_bytes:
            self._places.reserve(reserve_bytes)

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self._file.direct

    @property
    def file_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def frees_nothing(self) -> str:
        """Its folder may be memory of the host, as what comes from there is; from an accelerator's it has gone all the same."""
        if not self.in_memory or self._accelerator is not None:
            return ""
        return f"{self.folder} is itself memory (tmpfs): what was swapped there freed nothing; try another --swap-dir, on a disk"

    def write_async(self, storage: torch.UntypedStorage, over: Ticket | None = None) -> Ticket:
        """Start to move `storage` to the file; the ticket drops it when that is done. It must not be written to meanwhile.
        The place of `over` is free once that ticket is gone."""
        self._require_own_process()
        self.collect()
        if self.failure is not None:
            raise self.failure.again()
        if not self._workers:
            self._start()
        ticket = Ticket(storage, self._places.freed)
        self._submit(_WRITE, ticket, storage, ticket.written, 0, ticket.nbytes)
        return ticket

    def read_async(self, ticket: Ticket, into: torch.UntypedStorage) -> Pending:
        """Start to fill `into` (at least as large, made on this thread's stream) from `ticket`; again and again, if wanted."""
        if into.nbytes() < ticket.nbytes:
            raise ValueError(f"{ticket.nbytes} bytes do not fit into a storage of {into.nbytes()}")
        return self._read(ticket, 0, ticket.nbytes, into)

    def read_part(self, ticket: Ticket, begin: int, into: torch.UntypedStorage) -> Pending:
        """Start to fill all of `into` (made on this thread's stream) with the bytes of `ticket` from `begin` on, a multiple of a page."""
        if begin % PAGE_BYTES or begin + into.nbytes() > ticket.nbytes:
            raise ValueError(f"{into.nbytes()} bytes from {begin} on are no part of {ticket.nbytes}")
        return self._read(ticket, begin, into.nbytes(), into)

    def _read(self, ticket: Ticket, begin: int, nbytes: int, into: torch.UntypedStorage) -> Pending:
        self._require_own_process()
        self.collect()
        if ticket.state is State.OFF:
            raise ValueError("this ticket was taken back")
        done: Future[None] = Future()
        self._submit(_READ, ticket, into, done, begin, nbytes)
        return done if self._accelerator is None else _Arrival(done, into, self._accelerator)

    def wait(self, ticket: Ticket) -> None:
        """Until `ticket` is written; raises `SwapFailed` if it could not be (it then still holds its storage)."""
        self._require_own_process()
        error = ticket.written.exception()
        if error is not None:
            raise error.again() if isinstance(error, SwapFailed) else error
        self.collect()

    def collect(self) -> int:
        """Drop the storages that are safely written; their bytes. Asked after each op: it does nothing where there are none."""
        if not self._safe:
            return 0
        self._require_own_process()
        dropped: list[torch.UntypedStorage] = []
        with self._lock:  # backward has a thread for each device
            while self._safe:
                ticket = self._safe.popleft()
                if ticket.source is not None:
                    dropped.append(ticket.source)
                ticket.source = None
        if self._users is not None and dropped:
            with self._here():
                for storage in dropped:
                    self._users.may_use(storage)
        return sum(storage.nbytes() for storage in dropped)

    def take_back(self, ticket: Ticket) -> torch.UntypedStorage | None:
        """The storage, if the ticket still holds it; its write is then off. None once it has been written and dropped."""
        self._require_own_process()
        with self._lock:
            storage, ticket.source = ticket.source, None
            if storage is not None:
                ticket.state = State.OFF
            return storage

    def close(self) -> None:
        """Finish what is queued, stop the threads and give the disk space back. Tickets that were written are lost."""
        if os.getpid() != self._pid or self._file.fd < 0:
            return
        for _ in self._workers:
            self._queue.put((_STOP, next(self._order), None, 0))
        for worker in self._workers:
            worker.join()
        self._workers.clear()
        self._file.close()

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise SwapFailed(
                "swapped tensors belong to the process that swapped them",
                why="this process was forked from it",
                try_="--deny optimizer for its state, --deny swap for all else",
            )
        if self._file.fd < 0:
            raise SwapFailed("the swap file is closed")

    def _here(self) -> AbstractContextManager[object]:
        """The device is this thread's inside the block."""
        return contextlib.nullcontext() if self._accelerator is None else self._accelerator.here()

    def _start(self) -> None:
        """The threads, each with its buffer: where no more can be pinned it is told now, while nothing depends on them."""
        here, carriers = self._accelerator, list[Carrier]()
        try:
            with self._here():
                for _ in range(self._threads):
                    carriers.append(InMemory(PIECE_BYTES) if here is None else OnDevice(PIECE_BYTES, here))
        except SwapFailed as error:
            for carrier in carriers:
                carrier.close()
            self.failure = error
            raise
        self._workers = [
            threading.Thread(target=self._work, args=(carrier,), name="memopt-disk", daemon=True)
            for carrier in carriers
        ]
        for worker in self._workers:
            worker.start()

    def _submit(
        self,
        kind: int,
        ticket: Ticket,
        memory: torch.UntypedStorage,
        done: Future[None],
        begin: int,
        nbytes: int,
    ) -> None:
        with self._here():
            ready = self._users.current().record_event() if self._users is not None else None
        transfer = _Transfer(ticket, memory, done, nbytes, begin, _pieces(nbytes), ready)
        for piece in range(transfer.pieces):
            self._queue.put((kind, next(self._order), transfer, piece))

    def _work(self, carrier: Carrier) -> None:
        """One thread's life."""
        with self._here():
            self._serve(carrier)

    def _serve(self, carrier: Carrier) -> None:
        while True:
            kind, _, transfer, piece = self._queue.get()
            if transfer is None:
                carrier.close()
                return
            try:
                if transfer.error is None:
                    act = self._write_piece if kind == _WRITE else self._read_piece
                    act(transfer, piece * PIECE_BYTES, carrier)
            except BaseException as error:  # told through the future, whatever it is
                transfer.error = without_frames(error)
            self._finish_piece(kind, transfer)
            del transfer  # or this thread would keep the storage until its next piece

    def _write_piece(self, transfer: _Transfer, start: int, carrier: Carrier) -> None:
        ticket, memory = transfer.ticket, transfer.memory
        if ticket.state is State.OFF or memory is None:
            return
        offset = self._places.place(ticket)
        piece = transfer.piece(start)
        carrier.take(memory, piece)
        self._file.write(carrier.view[: piece.room_bytes], offset + start)

    def _read_piece(self, transfer: _Transfer, start: int, carrier: Carrier) -> None:
        ticket, memory = transfer.ticket, transfer.memory
        assert memory is not None, "only the last piece lets go of it"
        piece = transfer.piece(start)
        with self._lock:
            held, state = ticket.source, ticket.state
        if held is not None:
            carrier.copy(held, memory, piece)
            return
        if state is not State.WRITTEN or ticket.offset is None:
            raise SwapFailed("a swapped tensor was taken back while it was being read")
        self._file.read(carrier.view[: piece.room_bytes], ticket.offset + transfer.begin + start)
        carrier.put(memory, piece)

    def _finish_piece(self, kind: int, transfer: _Transfer) -> None:
        with self._lock:
            transfer.pieces -= 1
            if transfer.pieces:
                return
            if kind == _WRITE and transfer.error is None and transfer.ticket.state is State.HELD:
                transfer.ticket.state = State.WRITTEN
                self._safe.append(transfer.ticket)
                self.written_bytes += transfer.ticket.nbytes
            elif kind == _READ and transfer.error is None:
                self.read_bytes += transfer.nbytes
            if kind == _WRITE and isinstance(transfer.error, SwapFailed) and self.failure is None:
                self.failure = transfer.error
        transfer.memory = None
        if transfer.error is not None:
            transfer.done.set_exception(transfer.error)
        else:
            transfer.done.set_result(None)


def _pieces(nbytes: int) -> int:
    return max(1, -(-nbytes // PIECE_BYTES))


def _forget_in_child() -> None:
    """After a fork, in the child: let go of the parent's file. Its threads and locks do not exist here; touch neither."""
    for store in list(_stores):
        store._file.close()


os.register_at_fork(after_in_child=_forget_in_child)
