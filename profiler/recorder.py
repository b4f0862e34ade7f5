"""Records one iteration: every op with the storages it reads and writes, every saved tensor, births and deaths.

A `TorchDispatchMode` sees the ops, saved-tensor hooks see what autograd keeps, weak references see storages die.
Nothing that the script owns is kept alive by it: rows hold numbers, never tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from memopt.instrument import modes
from memopt.instrument.accumulate import goes_into_first
from memopt.instrument.as_plain import as_plain, run_as_plain
from memopt.instrument.deep_graphs import DEEP, make_room
from memopt.instrument.frames import Frames
from memopt.instrument.gradients_in_place import in_place_form, prepare
from memopt.instrument.iterations import Iterations
from memopt.instrument.nodes import as_json, attributes_of, is_torchs_own, saved_by
from memopt.instrument.ops import (
    PLAIN_TYPES,
    OpKind,
    copies_bytes,
    dtype_name,
    is_lent,
    is_plain,
    just_goes_on,
    kind_of,
    same_bits_again,
    tensors_in,
    unread_statistics,
    updated_statistics,
)
from memopt.instrument.saved import Kept
from memopt.instrument.script.lines import user_line
from memopt.instrument.torch_internals import (
    current_node,
    sequence_nr,
    storage_use_count,
)
from memopt.profiler.rows import BACKWARD, FORWARD, OPTIMIZER, OTHER, OpRow, SlotRow
from memopt.profiler.storages import StorageRows, describe
from memopt.profiler.timing.between_ops import BetweenOps
from memopt.profiler.timing.clock import OpClock
from memopt.profiler.value_facts import facts_of

_PLAIN_TYPES = frozenset(PLAIN_TYPES)

_MOST_POLLED, _FEW_POLLED = 256, 32
"""Saved storages that one op asks after, of the latest; the second once an iteration has very many ops."""


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


class Recorder(modes.Mode):
    """The mode and the hooks' functions; rows grow while it is entered."""

    sends_away = False
    """Do copies come and go between the ops that the script would not make?"""

    def __init__(
        self, frames: Frames, iterations: Iterations, clock: OpClock, device: str, most_ops: int = 10**6
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._frames = frames
        self._regions = frames.regions
        self._iterations = iterations
        self._clock = clock
        self.ops: list[OpRow] = []
        self.slots: list[SlotRow] = []
        self.met = StorageRows(device, self.ops, clock)
        self.storages, self.values = self.met.rows, self.met.values
        prepare()
        frames.resizes.told = self.met.will_be_resized
        frames.regions.rewrote = self.met.rewritten_unseen
        self._pending: dict[int, int] = {}
        """Saved storages that somebody else still holds: row -> cdata."""
        self._held_long: dict[int, int] = {}
        """Those of them that were saved before very many others."""
        self._unpacked = 0
        """Saved tensors that have been asked for."""
        self._saved_by: dict[int, list[weakref.ref[Handle]]] = {}
        self._node_ops: dict[int, int] = {}
        """Autograd sequence number (`_numbered`) -> forward op."""
        self._elsewhere: set[int] = set()
        """Slots that another thread packed: autograd's, in a backward call that makes a graph."""
        self._node_at: dict[int, int] = {}
        """Op of backward -> autograd sequence number of its node."""
        self.added_in_place: dict[int, int] = {}
        """Op of backward that would write into its first operand -> bytes of what it makes, which takes no memory of its own in a plain run."""
        self._named_nodes: set[int] = set()
        self._recording = True
        self.between = BetweenOps()
        self._most_ops = most_ops
        self.base_bytes = 0
        """Bytes of the storages that were known when the recording began."""
        self.overflow = False
        """There were more than `most_ops` ops: the rest is missing."""
        self.backward_calls = 0
        self.keep_graph = 0
        self.create_graph = 0
        self.grad_calls = 0
        """Calls of `torch.autograd.grad`."""
        self.cache_emptied: dict[str, int] = {}
        """Line of code -> calls of `empty_cache`."""
        self.notes: set[str] = set()

    # --- ops

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = as_plain(func)
        if not self._recording or self._regions.compiling:
            return run(*args, **kwargs)
        if not _PLAIN_TYPES.issuperset(types):
            return run(*args, **kwargs) if just_goes_on(types) else NotImplemented
        kind = kind_of(func)
        if kind.is_view:
            out = run(*args, **kwargs)
            if isinstance(out, Tensor):
                self.met.row_of(out)  # torch.tensor([...]) shows itself by a view op alone
            return out
        self.between.stop()
        op = len(self.ops)
        if op == DEEP:
            make_room()  # backward looks at its nodes
        if op >= self._most_ops:
            self.overflow = True
            self.stop()
            return run(*args, **kwargs)
        try:
            self._poll(op - 1)
            row = self._open_row(func, kind, op, args, kwargs)
            into_first = row.phase == BACKWARD and goes_into_first(func, args, kwargs, self._maker_of)
            row.in_place = row.phase == BACKWARD and in_place_form(func, args, kwargs) is not None
        except Exception as error:
            row, into_first = self._unseen(kind, error), False
        self.ops.append(row)
        out = self._clock.run(op, run, args, kwargs)
        try:
            if into_first:
                row.writes = (self.met.goes_on_in(args[0], out, op),)
                row.shape = describe(out)
                self.added_in_place[op] = out.untyped_storage().nbytes()
            else:
                self._close_row(row, op, args, kwargs, out)
        except Exception as error:
            self._unseen(kind, error)
        self.between.go_on()
        return out

    def begin(self, device: str) -> None:
        """What is known now was there before, on `device` or, where that is not known yet, on another."""
        self.met.begin()
        self.base_bytes = self.met.known_bytes(device)

    def only(self, device: str) -> None:
        """What was met on other devices than `device` weighs nothing."""
        if self.met.only(device):
            self.base_bytes = self.met.known_bytes(device)

    def also_held(self, all_bytes: int) -> None:
        """On the device there are `all_bytes` now: what no tensor shows (workspaces of cuBLAS, buckets of DDP) is a row of its own."""
        hidden_bytes = all_bytes - self.base_bytes
        if hidden_bytes > 0:
            self.met.hidden(hidden_bytes)
            self.base_bytes = all_bytes

    def _unseen(self, kind: OpKind, error: Exception) -> OpRow:
        """An op whose tensors could not be looked at must run all the same."""
        self.notes.add(f"{kind.name} could not be looked into ({type(error).__name__}: {error})"[:200])
        return OpRow(kind=kind, module="@", ordinal=0, phase=OTHER, line="", forward_op=-1, reads=())

    def _open_row(
        self, func: Any, kind: OpKind, op: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpRow:
        frame, forward_op, phase = self._frames.current, -1, self._phase()
        module = frame.key
        if phase == BACKWARD:
            module, forward_op = self._backward_place(module, op)
        else:
            self._node_ops.setdefault(self._numbered(sequence_nr() - 1, elsewhere=self._is_elsewhere), op)
            if self._makes_graph:
                forward_op = self._backward_place(module, op)[1]
        tensors = tensors_in((*args, *kwargs.values()) if kwargs else args)
        return OpRow(
            kind=kind,
            module=module,
            ordinal=frame.next_op(kind.name) if phase in (FORWARD, OTHER) else 0,
            phase=phase,
            line=self.ops[forward_op].line if forward_op >= 0 else user_line(),
            forward_op=forward_op,
            reads=self._values_in(tensors, unread_statistics(kind, args)),
            other_bits=not same_bits_again(func, tensors),
            compiled=self._regions.depth > 0,
        )

    def _values_in(self, tensors: list[Tensor], but: tuple[Tensor, ...]) -> tuple[int, ...]:
        """The values that `tensors` show now, each once, in order."""
        if but:
            statistics = {id(each) for each in but}
            tensors = [each for each in tensors if id(each) not in statistics]
        values = {self.met.value_of(each) for each in tensors}
        values.discard(-1)
        return tuple(sorted(values)) if len(values) > 1 else tuple(values)

    @property
    def _makes_graph(self) -> bool:
        """Does a backward call run that makes a graph of its own (`create_graph`)? To the next one it is forward."""
        return self._frames.thread.backward_makes_graph

    @property
    def _is_elsewhere(self) -> bool:
        """Does a thread of autograd's own run such a call?"""
        return self._makes_graph and get_ident() != self._frames.thread.ident

    @staticmethod
    def _numbered(number: int, *, elsewhere: bool) -> int:
        """Autograd numbers nodes in each thread by itself: those that were made `elsewhere` are negative here."""
        return ~number if elsewhere else number

    def _phase(self) -> int:
        if self._iterations.in_backward:
            return BACKWARD
        if torch.is_grad_enabled():
            return FORWARD
        return OPTIMIZER if self._iterations.in_step else OTHER

    def _backward_place(self, module: str, op: int) -> tuple[str, int]:
        """Module call and op of forward whose gradient is computed; those that run now where it is not known."""
        node = current_node()
        if node is None:
            return module, -1
        number = self._node_at[op] = node._sequence_nr()
        forward_op = self._node_ops.get(number, -1)
        return (module, -1) if forward_op < 0 else (self.ops[forward_op].module, forward_op)

    @property
    def runs_compiled(self) -> bool:
        """Are there kernels of torch.compile's, which no mode sees?"""
        return self._regions.has_compiled

    def _maker_of(self, tensor: Tensor) -> int | None:
        number = self.met.row_of(tensor)
        return self._node_at.get(self.values[self.storages[number].value][1]) if number >= 0 else None

    def _close_row(
        self, row: OpRow, op: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        kind, met = row.kind, self.met
        made: list[int | None] = []
        if kind.writes or kind.statistics is not None:
            written = (*self._written(kind, args, kwargs), *updated_statistics(kind, args))
            made += [met.written(tensor, op) for tensor in written]
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for index, given in enumerate(outputs):
            for tensor in given if isinstance(given, (tuple, list)) else (given,):
                if isinstance(tensor, Tensor):
                    made.append(met.born(tensor, op, index))
        row.writes = tuple([value for value in made if value is not None])
        row.copies = bool(args) and copies_bytes(kind.name, args[0], out)
        if outputs and isinstance(outputs[0], Tensor):
            row.shape = describe(outputs[0])

    @staticmethod
    def _written(kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        found: list[Tensor] = []
        for position, name in zip(kind.writes, kind.write_names, strict=True):
            given = args[position] if position < len(args) else kwargs.get(name)
            found += tensors_in((given,))
        return found

    # --- saved tensors

    def pack(self, tensor: Tensor) -> Kept:
        """The hook: a handle that keeps `tensor`, and its row."""
        if not self._recording:
            return Kept(tensor)
        with self.between.left_out():
            return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> Handle:
        frame = self._frames.current
        handle = Handle(tensor, self, len(self.slots))
        plain = is_plain(tensor)
        number = self.met.row_of(tensor) if plain else -1
        if self._iterations.in_backward or number < 0:
            handle.row = -1
            return handle
        if self._is_elsewhere:
            self._elsewhere.add(handle.row)
        storage = tensor.untyped_storage()
        self.slots.append(
            SlotRow(
                storage=number,
                value=self.met.present_value(number, tensor),
                frame=frame.key,
                ordinal=frame.packs,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                offset=int(tensor.storage_offset()),
                plain=not is_lent(storage),
                packed_before=len(self.ops),
            )
        )
        frame.packs += 1
        self._saved_by.setdefault(number, []).append(weakref.ref(handle))
        if not self.storages[number].category:
            self._held_long.pop(number, None)
            self._pending[number] = storage._cdata
            row = self.storages[number]
            if row.only_saved_from >= 0 and self._makes_graph:
                row.left_before += (row.only_saved_from,)
            row.only_saved_from = -1
        return handle

    def unpack(self, handle: Kept) -> Tensor:
        """The hook: the tensor of `handle`, and when it was asked for."""
        row = handle.row if isinstance(handle, Handle) and handle.owner is self else -1
        if self._recording and row >= 0:
            with self.between.left_out():
                self._asked_for(row)
        return handle.get()

    def _asked_for(self, row: int) -> None:
        self._name_node(elsewhere=row in self._elsewhere)
        slot = self.slots[row]
        if not slot.unpacks:
            slot.unpack_order = self._unpacked
            self._unpacked += 1
        slot.unpacks += (len(self.ops),)

    def _name_node(self, *, elsewhere: bool) -> None:
        """Look at what the running node, which another thread made or not, saved, once, to learn which handle is which slot."""
        node = current_node()
        if node is None:
            return
        number = self._numbered(node._sequence_nr(), elsewhere=elsewhere)
        if number in self._named_nodes:
            return
        self._named_nodes.add(number)
        name, attributes, is_torchs = node.name(), as_json(attributes_of(node)), is_torchs_own(node)
        called = self._node_ops.get(number, -1)
        named: set[int] = set()
        for slot_name, handle in saved_by(node):
            row = handle.row if isinstance(handle, Handle) and handle.owner is self else -1
            if row >= 0 and row not in named:
                named.add(row)
                slot = self.slots[row]
                slot.consumer = called if called >= 0 else self._op_after(slot, name)
                slot.node, slot.slot, slot.attributes = name, slot_name, attributes
                if not is_torchs:  # its kernels may have written what it saved (Liger's cross entropy)
                    self.storages[slot.storage].unseen = True

    def _op_after(self, slot: SlotRow, node: str) -> int:
        """The op that ran next, if it is that of `node`, which is not known where the op made another node first (`hardtanh_`)."""
        if slot.packed_before >= len(self.ops):
            return -1
        name = self.ops[slot.packed_before].kind.name.split(".")[1].replace("_", "")
        return slot.packed_before if node.partition("Backward")[0].lower() == name else -1

    def _poll(self, op: int, *, everything: bool = False) -> None:
        """Which saved storages does nobody but autograd hold any more, now that op `op` has ended?"""
        if self._iterations.in_backward or not (self._pending or self._held_long):
            return
        freed, saved_by = [], self._saved_by
        for number, address in self._to_ask_after(op, everything):
            references, ours = saved_by[number], self._holds_of(number)
            lives = references[0]() or _one_that_lives(references)  # else the address may be another's
            if lives is not None and storage_use_count(address) > len(references) + ours + 1:
                continue
            handles = {id(h.tensor): h for ref in references if (h := ref()) is not None}
            if not handles:
                freed.append(number)
            elif storage_use_count(address) <= len(handles) + ours + 1:
                self.storages[number].only_saved_from = op
                self.storages[number].facts = facts_of(number, handles[next(iter(handles))].tensor)
                freed.append(number)
                self._left_to_autograd(number, list(handles.values()))
        for number in freed:
            self._pending.pop(number, None)
            self._held_long.pop(number, None)

    def saved_now(self) -> set[int]:
        """ids of the tensors that are saved, and live."""
        return {id(handle.tensor) for handle in self._living()}

    def left_over(self) -> list[Handle]:
        """Handles, on the device, of a graph that lives on once the iteration is over."""
        return [handle for handle in self._living() if handle.bring is None]

    def _living(self) -> Iterator[Handle]:
        """All that have been packed, and that autograd still holds."""
        every = (reference() for references in self._saved_by.values() for reference in references)
        return (handle for handle in every if handle is not None)

    def _to_ask_after(self, op: int, everything: bool) -> list[tuple[int, int]]:
        """The latest of the saved storages, and some of the others in turn, where a script keeps very many (the states of a recurrent
        net): those come to light late."""
        late, early = self._pending, self._held_long
        if everything:
            return [*late.items(), *early.items()]
        most = _MOST_POLLED if op < DEEP else _FEW_POLLED
        while len(late) > most:
            number = next(iter(late))
            early[number] = late.pop(number)
        in_turn = list(islice(early.items(), _FEW_POLLED // 2))
        for number, address in in_turn:
            del early[number]
            early[number] = address
        return [*late.items(), *in_turn]

    def _holds_of(self, number: int) -> int:
        """How often the recorder itself holds storage `number`."""
        return 0

    def _left_to_autograd(self, number: int, handles: list[Handle]) -> None:
        """From now on only `handles` hold storage `number`. Recording alone leaves it where it is."""

    def stop(self) -> None:
        """No more rows; hooks and mode may stay in place for a while and only pass things through."""
        self._recording = False
        self.met.end()
        self._pending.clear()
        self._held_long.clear()

    def backward_began(self, roots: tuple[Tensor, ...], *, keep_graph: bool, create_graph: bool) -> None:
        self.backward_calls += 1
        self.keep_graph += int(keep_graph)
        self.create_graph += int(create_graph)
        self.grad_calls += int(not self._iterations.accumulates)
        self._poll(len(self.ops) - 1, everything=True)
        run_as_plain(roots)


def _one_that_lives(references: list[weakref.ref[Handle]]) -> Handle | None:
    return next((handle for reference in references if (handle := reference()) is not None), None)
