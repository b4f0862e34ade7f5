"""Records one iteration: every op with the storages it reads and writes, every saved tensor, births and deaths.

A `TorchDispatchMode` sees the ops, saved-tensor hooks see what autograd keeps, weak references see storages die.
Nothing that the script owns is kept alive by it: rows hold numbers, never tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memopt.instrument.frames import Frame, Frames
from memopt.instrument.iterations import Iterations
from memopt.instrument.lines import user_line
from memopt.instrument.ops import (
    PLAIN_TYPES,
    OpKind,
    is_lent,
    is_plain,
    is_tracing,
    kind_of,
    updated_statistics,
    version_of,
)
from memopt.instrument.saved import Kept
from memopt.profiler.clock import OpClock
from memopt.profiler.known import LEFT_OVER

FORWARD, BACKWARD, OPTIMIZER, OTHER = range(4)

_SURE = ("parameter", "gradient", "optimizer state", "buffer")


@dataclass(slots=True)
class OpRow:
    kind: OpKind
    module: str
    ordinal: int
    phase: int
    line: str
    forward_op: int
    reads: list[int]
    writes: list[int] = field(default_factory=list)
    shape: str = ""
    compiled: bool = False
    """It ran inside a region of torch.compile, whose other kernels nobody sees: never to be made again."""


@dataclass(slots=True)
class StorageRow:
    size_bytes: int
    birth: int
    value: int
    """Its current version."""
    death: int | None = None
    only_saved_from: int = -1
    meta: str = ""
    label_op: int = -1
    name: str = ""
    found: bool = False
    """No op of the recording made it: it was there when op `birth` came (from numpy, a list, a DataLoader's worker)."""
    unseen: bool = False
    """It changed without an op that was seen: its owner (FSDP) freed or refilled it, a kernel wrote it. What reads it runs once."""
    version: int = 0
    """What its tensors' version counter says after the writes that were seen."""
    lent: bool = False
    """Its bytes are somebody else's, who may change them unseen."""
    category: str = ""
    """Set where it is known for sure (parameter, gradient, ...); else worked out at the end."""


@dataclass(slots=True)
class SlotRow:
    storage: int
    value: int
    frame: str
    ordinal: int
    dtype: str
    shape: list[int]
    stride: list[int]
    offset: int
    plain: bool
    packed_before: int
    unpacks: list[int] = field(default_factory=list)
    unpack_order: int = -1
    node: str = ""
    slot: str = ""
    consumer: int = -1
    attributes: dict[str, Any] = field(default_factory=dict)


class Handle(Kept):
    """A saved tensor while recording: the tensor itself and its row."""

    __slots__ = ("bring", "owner", "row")

    def __init__(self, tensor: Tensor, owner: Recorder, row: int) -> None:
        super().__init__(tensor)
        self.owner = owner
        self.row = row
        self.bring: Callable[[], Tensor] | None = None
        """Brings the tensor back, where it was sent away while recording."""

    def get(self) -> Tensor:
        tensor = super().get()
        return tensor if self.bring is None else self.bring()


class Recorder(TorchDispatchMode):
    """The mode and the hooks' functions; rows grow while it is entered."""

    sends_away = False
    """Do copies come and go between the ops that the script would not make?"""

    def __init__(
        self, frames: Frames, iterations: Iterations, clock: OpClock, device: str, most_ops: int = 10**6
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._frames = frames
        self._regions = frames.regions
        frames.resizes.told = self._will_be_resized
        self._iterations = iterations
        self._clock = clock
        self.ops: list[OpRow] = []
        self.values: list[tuple[int, int, int]] = []
        self.storages: list[StorageRow] = []
        self.slots: list[SlotRow] = []
        self._rows: dict[int, int] = {}
        """Storage address (cdata) -> row, while the storage lives."""
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._pending: dict[int, int] = {}
        """Saved storages that somebody else still holds: row -> cdata."""
        self._unpacked = 0
        """Saved tensors that have been asked for."""
        self._saved_by: dict[int, list[weakref.ref[Handle]]] = {}
        self._node_ops: dict[int, int] = {}
        """Autograd sequence number -> forward op."""
        self._named_nodes: set[int] = set()
        self._recording = True
        self._begun = False
        self._most_ops = most_ops
        self.base_bytes = 0
        """Bytes of the storages that were known when the recording began."""
        self.overflow = False
        """There were more than `most_ops` ops: the rest is missing."""
        self.backward_calls = 0
        self.keep_graph = 0
        self.create_graph = 0
        self.notes: set[str] = set()

    # --- ops

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile: under any other mode it would run the model eagerly."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._recording or self._regions.compiling:
            return func(*args, **kwargs)
        if any(t not in PLAIN_TYPES for t in types):
            return func(*args, **kwargs) if is_tracing(types) else NotImplemented
        kind = kind_of(func)
        if kind.is_view:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                self._row_of(out)  # torch.tensor([...]) shows itself by a view op alone
            return out
        op = len(self.ops)
        if op >= self._most_ops:
            self.overflow = True
            self.stop()
            return func(*args, **kwargs)
        try:
            self._poll(op - 1)
            row = self._open_row(kind, op, args, kwargs)
        except Exception as error:
            row = self._unseen(kind, error)
        self.ops.append(row)
        out = self._clock.run(op, func, args, kwargs)
        try:
            self._close_row(row, op, args, kwargs, out)
        except Exception as error:
            self._unseen(kind, error)
        return out

    def begin(self) -> None:
        """What is known now was there before; what is met from now on without being made by an op has appeared since."""
        self.base_bytes = sum(row.size_bytes for row in self.storages)
        self._begun = True

    def _unseen(self, kind: OpKind, error: Exception) -> OpRow:
        """An op whose tensors could not be looked at must run all the same."""
        self.notes.add(f"{kind.name} could not be looked into ({type(error).__name__}: {error})"[:200])
        return OpRow(kind=kind, module="@", ordinal=0, phase=OTHER, line="", forward_op=-1, reads=[])

    def _open_row(self, kind: OpKind, op: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpRow:
        frame, forward_op, phase = self._frames.current, -1, self._phase()
        if phase == BACKWARD:
            frame, forward_op = self._backward_place(frame)
        else:
            self._node_ops.setdefault(torch._C._autograd._get_sequence_nr() - 1, op)
        statistics = {id(t) for t in updated_statistics(kind, args)}
        reads = [
            self._value_of(t)
            for t in tree_iter((args, kwargs))
            if isinstance(t, Tensor) and id(t) not in statistics
        ]
        row = OpRow(
            kind=kind,
            module=frame.key,
            ordinal=frame.ops,
            phase=phase,
            line=self.ops[forward_op].line if forward_op >= 0 else user_line(),
            forward_op=forward_op,
            reads=sorted({value for value in reads if value >= 0}),
            compiled=self._regions.depth > 0,
        )
        if phase in (FORWARD, OTHER):
            frame.ops += 1
        return row

    def _phase(self) -> int:
        if self._iterations.in_backward:
            return BACKWARD
        if torch.is_grad_enabled():
            return FORWARD
        return OPTIMIZER if self._iterations.in_step else OTHER

    def _backward_place(self, frame: Frame) -> tuple[Frame, int]:
        node = torch._C._current_autograd_node()
        forward_op = self._node_ops.get(node._sequence_nr(), -1) if node is not None else -1
        if forward_op < 0:
            return Frame(frame.key), -1
        return Frame(self.ops[forward_op].module), forward_op

    def _close_row(
        self, row: OpRow, op: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        for tensor in (*self._written(row.kind, args, kwargs), *updated_statistics(row.kind, args)):
            self._write(tensor, row, op, -1)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, Tensor):
                self._birth(tensor, row, op, index)
            elif isinstance(tensor, (tuple, list)):
                for part in tensor:
                    if isinstance(part, Tensor):
                        self._birth(part, row, op, index)
        if not row.shape and outputs and isinstance(outputs[0], Tensor):
            row.shape = _describe(outputs[0])

    @staticmethod
    def _written(kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        found: list[Tensor] = []
        for position, name in zip(kind.writes, kind.write_names, strict=True):
            given = args[position] if position < len(args) else kwargs.get(name)
            found.extend(t for t in tree_iter(given) if isinstance(t, Tensor))
        return found

    def _write(self, tensor: Tensor, row: OpRow, op: int, output: int) -> None:
        number = self._row_of(tensor)
        if number < 0:
            return
        storage = self.storages[number]
        storage.value = self._new_value(number, op, output)
        storage.version = version_of(tensor) + 1
        storage.size_bytes = max(storage.size_bytes, tensor.untyped_storage().nbytes())
        row.writes.append(storage.value)

    def _birth(self, tensor: Tensor, row: OpRow, op: int, index: int) -> None:
        known = len(self.storages)
        number = self._row_of(tensor, born=op)
        if number < known:
            return
        value = self._new_value(number, op, index)
        self.storages[number].value = value
        self.storages[number].label_op = op
        row.writes.append(value)

    # --- storages

    def _row_of(self, tensor: Tensor, born: int = -1) -> int:
        """Row of the tensor's storage, made if it is new; -1 for other devices and tensors without a storage of bytes."""
        storage = self._storage_of(tensor)
        if storage is None:
            return -1
        address = storage._cdata
        number = self._rows.get(address)
        if number is not None:
            return number
        size = storage.nbytes()
        number = len(self.storages)
        self._rows[address] = number
        self._refs[address] = weakref.ref(storage, lambda _: self._died(address))
        row = StorageRow(
            size_bytes=size, birth=born, value=-1, meta=_describe(tensor), version=version_of(tensor)
        )
        self.storages.append(row)
        if born < 0:
            row.lent = is_lent(storage)
            row.value = self._new_value(number, -1, -1)
            if self._begun and self.ops:
                row.birth, row.found = len(self.ops), True
        return number

    def _storage_of(self, tensor: Tensor) -> Any:
        """The tensor's storage on the watched device; None where it has none of its own bytes (sparse, meta, wrappers)."""
        try:
            if tensor.device.type != self._device:
                return None
            storage = tensor.untyped_storage()
            if type(tensor) not in PLAIN_TYPES and (
                storage.device.type != self._device or not storage.data_ptr()
            ):
                return None
        except (NotImplementedError, RuntimeError, AttributeError, ValueError):
            return None
        return storage

    def _died(self, address: int) -> None:
        number = self._rows.pop(address, None)
        self._refs.pop(address, None)
        if number is not None and self._recording:
            self._pending.pop(number, None)
            self.storages[number].death = len(self.ops) - 1
            if self.storages[number].birth < self._clock.knows_from:
                self._clock.freed_older(len(self.ops), self.storages[number].size_bytes)

    def _will_be_resized(self, storage: Any) -> None:
        number = self._rows.get(storage._cdata)
        if number is not None and self._recording:
            self.storages[number].unseen = True

    def _new_value(self, storage: int, op: int, output: int) -> int:
        self.values.append((storage, op, output))
        return len(self.values) - 1

    def _value_of(self, tensor: Tensor) -> int:
        number = self._row_of(tensor)
        return self._present_value(number, tensor) if number >= 0 else -1

    def _present_value(self, number: int, tensor: Tensor) -> int:
        """The value that storage `number` has now: another one when the counter tells of a write that no op did."""
        row = self.storages[number]
        version = version_of(tensor)
        if version > row.version:
            row.version, row.value, row.unseen = version, self._new_value(number, -1, -1), True
        return row.value

    def know(self, tensor: Tensor, category: str, name: str) -> None:
        """Tell what `tensor` is: its storage is in the trace even if no op touches it."""
        for part in _parts(tensor):
            number = self._row_of(part)
            if number >= 0:
                self._name(self.storages[number], category, name)

    def know_again(self, tensor: Tensor, category: str, name: str) -> None:
        """As `know`, at the end of a recording: only what it has met, and only what is sure."""
        for part in _parts(tensor):
            storage = self._storage_of(part)
            number = self._rows.get(storage._cdata) if storage is not None else None
            if number is None:
                continue
            row = self.storages[number]
            if category in _SURE or (row.found and not row.name and name != LEFT_OVER):
                self._name(row, category, name)

    @staticmethod
    def _name(row: StorageRow, category: str, name: str) -> None:
        if not row.category:
            row.category, row.name = category, name
        elif not row.name and row.category == category:
            row.name = name

    # --- saved tensors

    def pack(self, tensor: Tensor) -> Kept:
        """The hook: a handle that keeps `tensor`, and its row."""
        if not self._recording:
            return Kept(tensor)
        frame = self._frames.current
        handle = Handle(tensor, self, len(self.slots))
        plain = is_plain(tensor)
        number = self._row_of(tensor) if plain else -1
        plain = plain and number >= 0 and not is_lent(tensor.untyped_storage())
        if self._iterations.in_backward or number < 0:
            handle.row = -1
            return handle
        self.slots.append(
            SlotRow(
                storage=number,
                value=self._present_value(number, tensor),
                frame=frame.key,
                ordinal=frame.packs,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                stride=list(tensor.stride()),
                offset=int(tensor.storage_offset()),
                plain=plain,
                packed_before=len(self.ops),
            )
        )
        frame.packs += 1
        self._saved_by.setdefault(number, []).append(weakref.ref(handle))
        if not self.storages[number].category:
            self._pending[number] = tensor.untyped_storage()._cdata
            self.storages[number].only_saved_from = -1
        return handle

    def unpack(self, handle: Kept) -> Tensor:
        """The hook: the tensor of `handle`, and when it was asked for."""
        row = handle.row if isinstance(handle, Handle) and handle.owner is self else -1
        if self._recording and row >= 0:
            self._name_node()
            if not self.slots[row].unpacks:
                self.slots[row].unpack_order = self._unpacked
                self._unpacked += 1
            self.slots[row].unpacks.append(len(self.ops))
        return handle.get()

    def _name_node(self) -> None:
        """Look at what the running node saved, once, to learn which handle is which slot.

        The raw slots are looked at, not their tensors: reading a tensor would call the unpack hook of whoever packed it, and
        a second unpack inside non-reentrant `checkpoint` recomputes out of turn.
        """
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() in self._named_nodes:
            return
        self._named_nodes.add(node._sequence_nr())
        found: dict[int, str] = {}
        attributes: dict[str, Any] = {}
        names = dir(node)
        for attribute in names:
            if not attribute.startswith("_raw_saved_"):
                continue
            rows = self._rows_of(node, attribute)
            name = "saved_tensors" if "saved_tensors" in names else attribute.removeprefix("_raw_saved_")
            for place, row in enumerate(rows):
                found.setdefault(row, name if len(rows) == 1 else f"{name}[{place}]")
        for attribute in names:
            if attribute.startswith("_saved_") and f"_raw{attribute}" not in names:
                with contextlib.suppress(RuntimeError):
                    value = getattr(node, attribute)
                    if _is_simple(value):
                        name = attribute.removeprefix("_saved_")
                        attributes[name] = list(value) if isinstance(value, tuple) else value
        attributes["needs_input_grad"] = [edge[0] is not None for edge in node.next_functions]
        consumer = self._node_ops.get(node._sequence_nr(), -1)
        for row, name in found.items():
            if row >= 0:
                slot = self.slots[row]
                slot.node, slot.slot, slot.consumer, slot.attributes = node.name(), name, consumer, attributes

    def _rows_of(self, node: Any, attribute: str) -> list[int]:
        """Slots that we packed for the raw `attribute` of `node`; -1 for one that somebody else did."""
        try:
            raw = getattr(node, attribute)
        except RuntimeError:
            return []
        packed = [item.data for item in (raw if isinstance(raw, tuple) else (raw,))]
        return [
            handle.row if isinstance(handle, Handle) and handle.owner is self else -1
            for handle in packed
            if handle is not None
        ]

    def _poll(self, op: int) -> None:
        """Which saved storages does nobody but autograd hold any more, now that op `op` has ended?"""
        if self._iterations.in_backward:
            return
        freed = []
        for number, address in self._pending.items():
            handles = {id(h.tensor): h for ref in self._saved_by[number] if (h := ref()) is not None}
            if not handles:
                freed.append(number)
            elif torch._C._storage_Use_Count(address) <= len(handles) + 1:
                self.storages[number].only_saved_from = op
                freed.append(number)
                self._left_to_autograd(number, list(handles.values()))
        for number in freed:
            del self._pending[number]

    def _left_to_autograd(self, number: int, handles: list[Handle]) -> None:
        """From now on only `handles` hold storage `number`. Recording alone leaves it where it is."""

    def stop(self) -> None:
        """No more rows; hooks and mode may stay in place for a while and only pass things through."""
        self._recording = False
        self._pending.clear()

    def backward_began(self, *, keep_graph: bool, create_graph: bool) -> None:
        self.backward_calls += 1
        self.keep_graph += int(keep_graph)
        self.create_graph += int(create_graph)
        self._poll(len(self.ops) - 1)

    @property
    def forward_saves(self) -> int:
        return len(self.slots)


def _parts(tensor: Tensor) -> list[Tensor]:
    """`tensor`, or the tensors that a wrapper such as DTensor holds."""
    if type(tensor) in PLAIN_TYPES or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    try:
        names = tensor.__tensor_flatten__()[0]
        return [part for name in names for part in _parts(getattr(tensor, name))]
    except Exception:
        return []


def _is_simple(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < 16 and all(isinstance(v, (bool, int, float)) for v in value)
    return isinstance(value, (bool, int, float, str)) and value is not None


def _describe(tensor: Tensor) -> str:
    dtype = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        shape = "×".join(map(str, tensor.shape)) or "scalar"
    except RuntimeError:
        shape = "shapeless"  # nested tensors have none
    return f"{shape} {dtype.get(name, name)}"
