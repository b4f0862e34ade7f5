"""One weight that a tier holds: its storage is emptied in place and filled again in place, so that whoever holds it holds it still."""

from __future__ import annotations

import functools
import sys
import threading
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import UntypedStorage

from memopt.enforcers.tiers.feedback import OnStream, Use
from memopt.enforcers.tiers.swap import Pending, SwapFailed, SwapTier
from memopt.instrument.live_objects import no_collections
from memopt.instrument.memory.allocator_events import note_freed

_ARRIVED: Future[None] = Future()
_ARRIVED.set_result(None)


class Room(Protocol):
    """Who holds the device within a budget: told of memory that no op takes."""

    def has_room(self, size_bytes: int) -> bool:
        """Is there room for so much without anything leaving?"""

    def make_room(self, size_bytes: int) -> None:
        """So much is about to be taken."""

    def resized(self, storage: UntypedStorage) -> None:
        """`storage` has got its bytes, or has let go of them."""

    def looked_at(self, size_bytes: int) -> None:
        """So many bytes of optimizer state are about to come back, as the script looks at it; or gradients have."""

    def leaves_again(self) -> None:
        """State that the script has looked at is in the tier again, or the step is over after which it will be."""


class _Holder:
    __slots__ = ("storage",)

    def __init__(self, storage: UntypedStorage) -> None:
        self.storage = storage


@functools.cache
def _references() -> int:
    """To the storage of a tensor that nobody has but a holder who counts them: torch keeps one of its own from some version on."""
    with no_collections():  # which have references to all that is young
        tensor = torch.empty(0, device="cpu")
        holder = _Holder(tensor.untyped_storage())
        return sys.getrefcount(holder.storage)


class EmptiedStorage:
    """Between a copy out and the copy in that follows; one of them serves once. Asked for by any thread."""

    __slots__ = (
        "__weakref__",
        "_coming",
        "_gone",
        "_home",
        "_lock",
        "_noted",
        "_room",
        "_ticket",
        "_tier",
        "_use",
        "storage",
    )

    def __init__(
        self,
        tier: SwapTier[Any],
        storage: UntypedStorage,
        use: Use | None,
        *,
        noted: bool,
        room: Room | None = None,
    ) -> None:
        """Starts the copy out. `noted`: its bytes were allocated since the profile of this iteration began, which sees them end."""
        self._tier, self._use, self._noted, self._room = tier, use, noted, room
        if use is not None:
            use.is_later = True
        self.storage = storage
        self._ticket = tier.write_async(storage)
        self._gone = False
        """The storage has no bytes."""
        self._home = False
        """It has never lost them, and will not."""
        self._coming: Pending | None = None
        self._lock = threading.RLock()

    @property
    def size_bytes(self) -> int:
        return int(self._ticket.nbytes)

    def settle(self) -> bool:
        """Let go of the bytes, if the copy out is safe; True when there is nothing left to wait for."""
        with self._lock:
            if not (self._gone or self._home) and self._ticket.source is None:
                self._gone = True
                if not self._noted:
                    note_freed(self.storage.nbytes())
                self._resize(0)
            return self._gone or self._home

    def wait_until_away(self) -> None:
        """Until the copy is safe. Raises `SwapFailed` if it failed; the bytes stay then."""
        if self.settle():
            return
        try:
            self._tier.wait(self._ticket)
        except SwapFailed:
            self._home = True
            raise
        self.settle()

    def prefetch(self) -> None:
        """Start to bring it back; one that has not left yet just stays, one for which there is no room yet waits for `get`."""
        if self._room is not None and not self._room.has_room(self._ticket.nbytes):
            return
        try:
            self._bring()
        except RuntimeError:  # out of memory
            self._tier.collect()

    def _bring(self) -> None:
        with self._lock:
            if self._home or self._coming is not None:
                return
            if not self._gone:
                self._tier.take_back(self._ticket)
                self._home = True
                return
            if self._use is not None:
                self._use.begins()
            if self._room is not None:
                self._room.make_room(self._ticket.nbytes)
            self._resize(self._ticket.nbytes)
            try:
                self._coming = self._tier.read_async(self._ticket, self.storage)
            except BaseException:
                self._resize(0)
                raise

    def get(self) -> None:
        """The storage has its bytes, for everybody who asks on this stream."""
        self.prefetch()
        with self._lock:
            self._bring()
            coming = self._coming
        if coming is not None and self._use is not None:
            self._use.wait(coming)
        elif coming is not None:
            coming.result()

    def leave_again(self, *, noted: bool) -> bool:
        """Let go of the bytes once more, without a copy: the tier has them still, for whoever says that nothing has written to them since.
        False where they never left. `noted`: as above."""
        with self._lock:
            if not self._gone:
                return False
            if self._coming is not None:
                self._coming.result()  # its memory may be somebody else's at once, on this stream
                self._coming = None
                if not noted:
                    note_freed(self.storage.nbytes())
                self._resize(0)
            return True

    def finish(self) -> None:
        """The bytes are there for every stream."""
        self.get()
        if isinstance(self._coming, OnStream):
            self._coming.finish()

    @property
    def is_held(self) -> bool:
        """Has somebody else the storage itself? Of that there is one object, whoever asked for it, and torch counts it once."""
        with self._lock:
            if self._coming is not None and self._use is None:
                self.finish()
                self._coming = _ARRIVED  # a copy in holds where it goes to
            if sys.getrefcount(self.storage) > _references():
                self._tier.collect()  # as a tier does, until it has seen that the copy is over
            return sys.getrefcount(self.storage) > _references()

    @property
    def was_filled(self) -> bool:
        """Has it got new memory?"""
        return self._coming is not None

    def _resize(self, size_bytes: int) -> None:
        """Past `instrument.memory.resizes`: no value changes by it."""
        super(UntypedStorage, self.storage).resize_(size_bytes)
        if self._room is not None:
            self._room.resized(self.storage)
