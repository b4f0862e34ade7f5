"""The storages that a recording meets: found again while they live, with the values that they hold one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.instrument.identity import NO_STORAGE, parts_of
from memopt.instrument.memory.buckets import BUCKET
from memopt.instrument.ops import PLAIN_TYPES, is_lent, version_of
from memopt.profiler.rows import BACKWARD, OpRow, StorageRow
from memopt.profiler.timing.clock import OpClock
from memopt.trace import LEFT_OVER

HIDDEN = "held by libraries, in no tensor (workspaces of cuBLAS, ...)"
_SURE = ("parameter", "gradient", "optimizer state", "buffer")


class StorageRows:
    """A row for each storage on `device`, by its address while it lives. `ops` grows while the recording goes on.

    Without a device those on all are met; `only` tells afterwards which counts.
    """

    def __init__(self, device: str, ops: list[OpRow], clock: OpClock) -> None:
        self._device = device
        self._is_watched = _watch(device)
        self._ops = ops
        self._clock = clock
        self.rows: list[StorageRow] = []
        self.values: list[tuple[int, int, int]] = []
        """(storage, op that made it, output of that op)"""
        self._numbers: dict[int, int] = {}
        """Storage address (cdata) -> row, while the storage lives."""
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._emptied: dict[int, int] = {}
        """Storage address -> its former row, while the storage lives."""
        self._expected = -1
        """Row of what is there, and what nobody in Python has met yet."""
        self._begun = False
        self._ended = False

    def begin(self) -> None:
        """What is known now was there before; what is met from now on without being made by an op has appeared since."""
        self._begun = True

    def known_bytes(self, device: str) -> int:
        """On `device`, of what was there before."""
        return sum(row.size_bytes for row in self.rows if row.birth < 0 and row.device == device)

    def end(self) -> None:
        """What happens to storages from now on is not noted."""
        self._ended = True

    def row_of(self, tensor: Tensor, born: int = -1) -> int:
        """Row of the tensor's storage, made if it is new; -1 for other devices and tensors without a storage of bytes."""
        try:
            storage = tensor.untyped_storage()
        except NO_STORAGE:
            return -1
        address = storage._cdata
        number = self._numbers.get(address)
        if number is not None:
            return number
        if not self._is_met(tensor, storage):
            return -1
        size = storage.nbytes()
        number = len(self.rows)
        self._numbers[address] = number
        self._refs[address] = weakref.ref(storage, partial(self._died, address))
        row = StorageRow(
            size_bytes=size,
            birth=born,
            value=-1,
            meta=describe(tensor),
            version=version_of(tensor),
            device=self._device or storage.device.type,
        )
        self.rows.append(row)
        former = self._emptied.pop(address, None)
        if former is not None:
            row.category, row.name, row.unseen = self.rows[former].category, self.rows[former].name, True
        if born < 0:
            row.lent = is_lent(storage)
            row.value = self._new_value(number, -1, -1)
            if self._begun and self._ops and not self._was_expected(row):
                row.birth, row.found = len(self._ops), True
        return number

    def hidden(self, size_bytes: int, name: str = HIDDEN) -> int:
        """Bytes that were there before and belong to no tensor of Python's: their row."""
        number = len(self.rows)
        self.rows.append(StorageRow(size_bytes, -1, -1, category="workspace", name=name, lent=True))
        self.rows[number].value = self._new_value(number, -1, -1)
        return number

    def expect(self, sizes: list[int], device: str) -> None:
        """Buckets on `device`, of so many bytes together, were there before, in C++; backward will show them to Python for the first time."""
        if sum(sizes):
            self._expected = self.hidden(sum(sizes), name=BUCKET)
            self.rows[self._expected].device = device

    def _was_expected(self, row: StorageRow) -> bool:
        """Is it one of the buckets? It leaves those that are expected then."""
        if self._expected < 0 or row.lent or self._ops[-1].phase != BACKWARD:
            return False
        rest = self.rows[self._expected]
        if row.size_bytes > rest.size_bytes:
            return False
        rest.size_bytes -= row.size_bytes
        row.category, row.name = rest.category, rest.name
        return True

    def _is_met(self, tensor: Tensor, storage: UntypedStorage) -> bool:
        """Is the tensor's storage on the watched device, with bytes of its own (those of meta tensors, wrappers and zeros of a tangent have none)?"""
        try:
            if not self._is_watched(tensor) or tensor._is_zerotensor():
                return False
            return type(tensor) in PLAIN_TYPES or (
                self._is_there(storage.device) and bool(storage.data_ptr())
            )
        except NO_STORAGE:
            return False

    def _is_there(self, device: torch.device) -> bool:
        return device.type == self._device if self._device else device.type != "meta"

    def only(self, device: str) -> bool:
        """Rows of other devices than `device` weigh nothing; whether there may be such."""
        if self._device:
            return False
        for row in self.rows:
            row.size_bytes *= row.device == device
        self._device, self._is_watched = device, _watch(device)
        return True

    # --- ends

    def _died(self, address: int, _: weakref.ref[Any]) -> None:
        number = self.forget(address)
        if number is None or self._ended:
            return
        self.ends(number)
        row = self.rows[number]
        if row.birth < self._clock.knows_from:
            self._clock.freed_older(len(self._ops), row.size_bytes)

    def forget(self, address: int) -> int | None:
        """The storage at `address` goes; its row, which does not die with it."""
        self._refs.pop(address, None)
        self._emptied.pop(address, None)
        return self._numbers.pop(address, None)

    def came_back(self, number: int, storage: Any) -> None:
        """Row `number` has a new storage."""
        address = storage._cdata
        self._numbers[address] = number
        self._refs[address] = weakref.ref(storage, lambda _: self.forget(address))

    def shown_anew(self, number: int, tensor: Tensor) -> None:
        """What is in row `number` is in `tensor` from here on, with a version counter of its own: nobody has written it."""
        self.rows[number].version = version_of(tensor)

    def goes_on_in(self, old: Tensor, new: Tensor, op: int) -> int:
        """`op` made `new` of `old`, whose bytes it would have written had nobody watched: one row for both. The value that it made."""
        number, storage = self.row_of(old), new.untyped_storage()
        self.forget(old.untyped_storage()._cdata)
        address, row = storage._cdata, self.rows[number]
        self._numbers[address] = number
        self._refs[address] = weakref.ref(storage, partial(self._died, address))
        row.value, row.version = self._new_value(number, op, -1), version_of(new)
        return row.value

    def ends(self, number: int) -> None:
        """Nobody will ask for row `number` again."""
        if not self._ended:
            self.rows[number].death = len(self._ops) - 1

    def will_be_resized(self, storage: Any) -> None:
        """Its owner frees or refills `storage`, without an op: what is met there afterwards is another row."""
        if self._ended:
            return
        number = self._numbers.pop(storage._cdata, None)
        if number is not None:
            self.rows[number].unseen = True
            self.ends(number)
            self._emptied[storage._cdata] = number

    # --- values

    def _new_value(self, storage: int, op: int, output: int) -> int:
        self.values.append((storage, op, output))
        return len(self.values) - 1

    def value_of(self, tensor: Tensor) -> int:
        """The value that `tensor` shows now; -1 where it has no row."""
        number = self.row_of(tensor)
        return self.present_value(number, tensor) if number >= 0 else -1

    def present_value(self, number: int, tensor: Tensor) -> int:
        """The value that storage `number` has now: another one when the counter tells of a write that no op did."""
        row = self.rows[number]
        version = version_of(tensor)
        if version > row.version:
            row.version, row.value, row.unseen = version, self._new_value(number, -1, -1), True
        return row.value

    def rewritten_unseen(self, tensor: Tensor) -> None:
        """A kernel that nobody sees into may have written `tensor`."""
        number = self.row_of(tensor)
        if number >= 0 and not self._ended:
            row = self.rows[number]
            row.value, row.unseen = self._new_value(number, -1, -1), True

    def born(self, tensor: Tensor, op: int, output: int) -> int | None:
        """`op` gave `tensor`: the value that it made, None where the storage was there before."""
        known = len(self.rows)
        number = self.row_of(tensor, born=op)
        if number < known:
            return None
        row = self.rows[number]
        row.value = self._new_value(number, op, output)
        row.label_op = op
        return row.value

    def written(self, tensor: Tensor, op: int) -> int | None:
        """`op` wrote `tensor` in place: the value that it made, None where there is no row."""
        number = self.row_of(tensor)
        if number < 0:
            return None
        row = self.rows[number]
        row.value = self._new_value(number, op, -1)
        row.version = version_of(tensor) + 1
        row.size_bytes = max(row.size_bytes, tensor.untyped_storage().nbytes())
        return row.value

    # --- names

    def know(self, tensor: Tensor, category: str, name: str) -> None:
        """Tell what `tensor` is: its storage is in the trace even if no op touches it."""
        for part in parts_of(tensor):
            number = self.row_of(part)
            if number >= 0:
                _name(self.rows[number], category, name)

    def know_again(self, tensor: Tensor, category: str, name: str) -> None:
        """As `know`, at the end of a recording: only what it has met, and only what is sure."""
        for part in parts_of(tensor):
            try:
                number = self._numbers.get(part.untyped_storage()._cdata)
            except NO_STORAGE:
                continue
            if number is None:
                continue
            row = self.rows[number]
            if category in _SURE or (row.found and not row.name and not name.startswith(LEFT_OVER)):
                _name(row, category, name)


def _watch(device: str) -> Callable[[Tensor], bool]:
    """Is a tensor on the device that is watched? Asked of every tensor of every op, in a tenth of the time that `device.type` takes."""
    return attrgetter(f"is_{device}") if device else lambda tensor: not tensor.is_meta


def _name(row: StorageRow, category: str, name: str) -> None:
    if not row.category:
        row.category, row.name = category, name
    elif not row.name and row.category == category:
        row.name = name


def describe(tensor: Tensor) -> str:
    """`4×1024 bf16`. Nested tensors have no shape, and those that `torch.compile` keeps one of symbols."""
    try:
        return _in_words(tensor.shape, tensor.dtype)
    except (RuntimeError, TypeError):
        return f"shapeless {_short(tensor.dtype)}"


@lru_cache(maxsize=10_000)
def _in_words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{'×'.join(map(str, shape)) or 'scalar'} {_short(dtype)}"


@cache
def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}.get(name, name)
