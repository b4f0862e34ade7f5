"""Recording a script that does not fit: every saved tensor leaves the device once only autograd holds it.

The trace is the same as without: a storage's row lives until its last handle is gone, wherever its bytes are meanwhile.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, UntypedStorage

from memopt.errors import MemoptError
from memopt.instrument.memory.held import held_bytes
from memopt.instrument.one_stream import OneStream
from memopt.instrument.saved import Kept, Place, let_go_of_bytes
from memopt.instrument.torch_internals import DisableTorchDispatch
from memopt.profiler.recorder import Handle, Recorder

LEAST_BYTES = 64 * 1024


class Tier(Protocol):
    """Where bytes go; `enforcers.swap.SwapTier` is one, and is handed in."""

    def write_async(self, storage: UntypedStorage, /) -> Any: ...
    def read_async(self, ticket: Any, into: UntypedStorage, /) -> Any: ...
    def wait(self, ticket: Any, /) -> None: ...
    def take_back(self, ticket: Any, /) -> UntypedStorage | None: ...
    def collect(self) -> int: ...
    def close(self) -> None: ...


OpenTier = Callable[[], Tier]
"""Makes a tier for the storages of all devices."""


class OffloadingRecorder(Recorder):
    """A recorder that sends saved storages to `tier`."""

    tier: Tier
    from_bytes = 0
    """On the device: storages leave from then on."""
    under_way_bytes: int
    """Copies out beyond that are waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kind, self._held_bytes = "", 0
        """The device, and how much was held there as it began."""
        self._leaving: deque[weakref.ref[_Away]] = deque()
        self._streams = OneStream()
        self._away: weakref.WeakValueDictionary[int, _Away] = weakref.WeakValueDictionary()
        """By storage: where it has been sent."""
        self._staying: set[int] = set()
        """Storages that were saved on another stream than the first."""

    def begin(self, device: str) -> None:
        super().begin(device)
        self._kind, self._held_bytes = device, held_bytes(device)

    def _poll(self, op: int, *, everything: bool = False) -> None:
        self.tier.collect()
        super()._poll(op, everything=everything)

    def pack(self, tensor: Tensor) -> Kept:
        handle = super().pack(tensor)
        if isinstance(handle, Handle) and handle.row >= 0 and self._streams.why_keep(tensor.device):
            self._staying.add(self.slots[handle.row].storage)
        return handle

    def _left_to_autograd(self, number: int, handles: list[Handle]) -> None:
        storage = handles[0].tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or not self._is_full:
            return
        self.sends_away = True
        if number in self._staying or self._streams.why_keep(storage.device):
            self.notes.add("not everything could be offloaded: the script computes on several streams")
            return
        away = self._away.get(number)
        try:
            if away is None or any(handle.version != away.version for handle in handles):
                away = self._away[number] = _Away(self, number, storage)
            else:  # a backward call that makes a graph has saved it again
                away.leave_again(storage)
        except MemoptError as error:
            self.notes.add(f"not everything could be offloaded: {error.what}")
            return
        for handle in handles:
            away.take(handle)
        self._saved_by[number].clear()
        self._leaving.append(weakref.ref(away))
        self._let_them_leave()

    @property
    def _is_full(self) -> bool:
        if self.sends_away or not self.from_bytes:
            return True
        return self.base_bytes + held_bytes(self._kind) - self._held_bytes >= self.from_bytes

    def _holds_of(self, number: int) -> int:
        away = self._away.get(number)
        return int(away is not None and away.is_home)

    def _let_them_leave(self) -> None:
        """Wait for the oldest copies out, until no more than `under_way_bytes` are left."""
        self.tier.collect()
        known = [away for reference in self._leaving if (away := reference()) is not None]
        leaving = deque(away for away in known if away.is_leaving)
        under_way = sum(away.size_bytes for away in leaving)
        while under_way > self.under_way_bytes:
            oldest = leaving.popleft()
            under_way -= oldest.size_bytes
            try:
                self.tier.wait(oldest.ticket)
            except MemoptError as error:
                self.notes.add(f"not everything could be offloaded: {error.what}")
        self._leaving = deque(map(weakref.ref, leaving))

    def unpack(self, handle: Any) -> Tensor:
        self.tier.collect()
        return super().unpack(handle)


class _Away:
    """One storage in the tier, and the handles that it was taken from."""

    def __init__(self, recorder: OffloadingRecorder, number: int, storage: UntypedStorage) -> None:
        self._recorder = recorder
        self._number = number
        self._device = storage.device
        self.size_bytes = storage.nbytes()
        self._back: weakref.ref[UntypedStorage] | None = None
        self._home: UntypedStorage | None = None
        """The storage itself, where it was asked for before it had left."""
        self._handles: list[weakref.ref[Handle]] = []
        self.version = -1
        """Of the tensors that show it since it has come back."""
        self.ticket = recorder.tier.write_async(storage)
        recorder.met.forget(storage._cdata)

    @property
    def is_home(self) -> bool:
        """Has it come back without having left?"""
        return self._home is not None

    def leave_again(self, storage: UntypedStorage) -> None:
        """It has come back as `storage`, which nobody has written, and leaves."""
        if self._home is not None:
            self.ticket = self._recorder.tier.write_async(storage)
            self._home = None
        self._recorder.met.forget(storage._cdata)

    @property
    def is_leaving(self) -> bool:
        """The copy has not been seen to end."""
        return self.ticket.source is not None

    def take(self, handle: Handle) -> None:
        tensor = handle.tensor
        place = Place.of(tensor)
        handle.bring = lambda: self._view(place)
        let_go_of_bytes(tensor)
        self._handles.append(weakref.ref(handle, self._handle_gone))

    def _view(self, place: Place) -> Tensor:
        """A tensor over the storage; no mode sees it being made."""
        guard = DisableTorchDispatch()
        try:
            tensor = place.on(self._storage())
            self._recorder.met.shown_anew(self._number, tensor)
            self.version = tensor._version
            return tensor
        finally:
            del guard

    def _handle_gone(self, handle: weakref.ref[Handle]) -> None:
        self._handles.remove(handle)
        if not self._handles:
            self._recorder.met.ends(self._number)

    def _storage(self) -> UntypedStorage:
        if self._home is not None:
            return self._home
        back = self._back() if self._back is not None else None
        if back is not None:
            return back
        self._home = self._recorder.tier.take_back(self.ticket)
        if self._home is not None:
            self._recorder.met.came_back(self._number, self._home)
            return self._home
        storage = UntypedStorage(self.size_bytes, device=self._device)
        self._recorder.met.came_back(self._number, storage)
        self._recorder.tier.read_async(self.ticket, storage).result()
        self._back = weakref.ref(storage)
        return storage
