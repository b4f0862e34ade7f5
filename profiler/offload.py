"""Recording a script that does not fit: every saved tensor leaves the device once only autograd holds it.

The trace is the same as without: a storage's row lives until its last handle is gone, wherever its bytes are meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from memopt.errors import MemoptError
from memopt.instrument.saved import Place, let_go_of_bytes
from memopt.profiler.recorder import Handle, Recorder

LEAST_BYTES = 64 * 1024


class Tier(Protocol):
    """Where bytes go; `enforcers.swap.SwapTier` is one, and is handed in."""

    def write_async(self, storage: UntypedStorage, /) -> Any: ...
    def read_async(self, ticket: Any, into: UntypedStorage, /) -> Any: ...
    def take_back(self, ticket: Any, /) -> UntypedStorage | None: ...
    def collect(self) -> int: ...
    def close(self) -> None: ...


OpenTier = Callable[[], Tier]
"""Makes a tier for the storages of all devices."""


class OffloadingRecorder(Recorder):
    """A recorder that sends saved storages to `tier`."""

    sends_away = True
    tier: Tier

    def _poll(self, op: int) -> None:
        self.tier.collect()
        super()._poll(op)

    def _left_to_autograd(self, number: int, handles: list[Handle]) -> None:
        storage = handles[0].tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES:
            return
        try:
            away = _Away(self, number, storage)
        except MemoptError as error:
            self.notes.add(f"not everything could be offloaded: {error.what}")
            return
        for handle in handles:
            away.take(handle)

    def unpack(self, handle: Any) -> Tensor:
        self.tier.collect()
        return super().unpack(handle)


class _Away:
    """One storage in the tier, and the handles that it was taken from."""

    def __init__(self, recorder: OffloadingRecorder, number: int, storage: UntypedStorage) -> None:
        self._recorder = recorder
        self._number = number
        self._device = storage.device
        self._bytes = storage.nbytes()
        self._back: weakref.ref[UntypedStorage] | None = None
        self._home: UntypedStorage | None = None
        """The storage itself, where it was asked for before it had left."""
        self._handles: list[weakref.ref[Handle]] = []
        self._ticket = recorder.tier.write_async(storage)
        recorder.met.forget(storage._cdata)

    def take(self, handle: Handle) -> None:
        tensor = handle.tensor
        place = Place.of(tensor)
        handle.bring = lambda: self._view(place)
        let_go_of_bytes(tensor)
        self._handles.append(weakref.ref(handle, self._handle_gone))

    def _view(self, place: Place) -> Tensor:
        """A tensor over the storage; no mode sees it being made."""
        guard = torch._C._DisableTorchDispatch()
        try:
            return place.on(self._storage())
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
        self._home = self._recorder.tier.take_back(self._ticket)
        if self._home is not None:
            self._recorder.met.came_back(self._number, self._home)
            return self._home
        storage = UntypedStorage(self._bytes, device=self._device)
        self._recorder.met.came_back(self._number, storage)
        self._recorder.tier.read_async(self._ticket, storage).result()
        self._back = weakref.ref(storage)
        return storage
