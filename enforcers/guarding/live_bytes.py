"""Bytes that are live on the device.

The caching allocator's where there is one. On a CPU they are the storages that were there at the start and those that ops make; what an
op takes besides its outputs is not seen. Buckets of DistributedDataParallel count from the start, and once: when an op shows one, it is none of the hidden.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.instrument.identity import NO_STORAGE
from memopt.instrument.memory.meter import hidden_buckets, living_storages
from memopt.instrument.ops import PLAIN_TYPES, is_plain, tensors_in

_STRIDED = torch.strided


class _Counted(weakref.ref[UntypedStorage]):
    """A storage whose bytes count."""

    __slots__ = ("address", "size_bytes")
    address: int
    size_bytes: int


class Live:
    """Bytes on the device."""

    def __init__(self, device: str) -> None:
        """Knows of nothing until it has looked around."""
        self._device = device
        self._is_there: Callable[[Tensor], bool] = attrgetter(f"is_{device}")
        self._counted: dict[int, _Counted] = {}
        self._hidden: Counter[int] = Counter()
        """Sizes of the buckets that no op has shown yet."""
        self.bytes = 0
        self.most = 0

    def look_around(self) -> Live:
        """Count what there is, whatever was known before; itself."""
        self._counted.clear()
        self._hidden.clear()
        self.bytes = 0
        if self._device == "cpu":
            for storage in living_storages(self._device):
                self.met(storage)
            self._hidden.update(hidden_buckets(self._device))
            self.bytes += sum(self._hidden.elements())
            self.most = max(self.most, self.bytes)
        return self

    def met(self, storage: UntypedStorage) -> None:
        """Count `storage`, if it is new."""
        address = storage._cdata
        if address not in self._counted:
            counted = self._counted[address] = _Counted(storage, self._gone)
            counted.address, counted.size_bytes = address, storage.nbytes()
            if self._hidden and self._hidden[counted.size_bytes]:
                self._hidden[counted.size_bytes] -= 1
            else:
                self.bytes += counted.size_bytes
                if self.bytes > self.most:
                    self.most = self.bytes

    def met_among(self, arguments: Iterable[object]) -> None:
        """Count what an op is given, as far as it is new."""
        if self._device != "cpu":
            return
        for tensor in tensors_in(arguments):
            if type(tensor) not in PLAIN_TYPES or tensor.layout is not _STRIDED or not self._is_there(tensor):
                continue
            with contextlib.suppress(*NO_STORAGE):  # what torch.func has wrapped
                storage = tensor.untyped_storage()
                if storage._cdata not in self._counted and is_plain(tensor):
                    self.met(storage)

    def resized(self, storage: UntypedStorage) -> None:
        """Count what `storage` has now, and no more what it had."""
        counted = self._counted.get(storage._cdata)
        if counted is None:
            self.met(storage)
            return
        self.bytes += storage.nbytes() - counted.size_bytes
        counted.size_bytes = storage.nbytes()
        self.most = max(self.most, self.bytes)

    def made(self, out: Any) -> int:
        """Count what an op gave, as far as it is new; its bytes."""
        if self._device != "cpu":
            self.now()
            return bytes_of((out,))
        before = self.bytes
        for tensor in (out,) if type(out) is Tensor else tensors_in((out,)):
            if self._is_there(tensor) and (is_plain(tensor) or _is_nested(tensor)):
                self.met(tensor.untyped_storage())
        return self.bytes - before

    def _gone(self, counted: _Counted) -> None:
        if self._counted.pop(counted.address, None) is not None:
            self.bytes -= counted.size_bytes

    def now(self) -> int:
        """Bytes at this moment."""
        if self._device == "cpu":
            return self.bytes
        held = torch.cuda.memory_allocated()
        self.most = max(self.most, held)
        return held


def bytes_of(values: Iterable[object]) -> int:
    return sum([each.nbytes for each in tensors_in(values) if each.layout is _STRIDED])


def _is_nested(tensor: Tensor) -> bool:
    """Is it a nested tensor of torch's first kind, which has no shape, but a storage of its own?"""
    return tensor.is_nested and tensor.layout is _STRIDED and type(tensor) in PLAIN_TYPES
