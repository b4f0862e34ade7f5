"""What recorded ops made: which storage holds which value now, and which records hold which storage as a source.

Every way in which bytes can change passes here first, so that what was to be made from them is made before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.enforcers.codecs.encoded import Encoded
from memopt.enforcers.records import Pinned, Record, Value, View, output_tensors
from memopt.enforcers.replays import Kept, make
from memopt.enforcers.tiers.swap import SwapFailed, SwapTier
from memopt.enforcers.tiers.swapped import LEAST_BYTES, SwappedStorage
from memopt.instrument.ops import PLAIN_TYPES, OpKind, is_plain, tensors_in, version_of
from memopt.instrument.saved import Place
from memopt.instrument.script.training_thread import TrainingThread
from memopt.instrument.torch_internals import storage_of


class _Address(weakref.ref[UntypedStorage]):
    """A storage that may die, and where it was then."""

    __slots__ = ("address",)
    address: int

    def __new__(cls, storage: UntypedStorage, died: Callable[[_Address], None]) -> _Address:
        """`died` is called with it when the storage has gone."""
        self = super().__new__(cls, storage, died)
        self.address = storage._cdata
        return self


class Values:
    """The values of one run, by the storages that hold them."""

    def __init__(self, thread: TrainingThread) -> None:
        self._thread = thread
        self._died = self._storage_died
        self._values: dict[int, Value] = {}
        """Storage address -> the value that it holds now, of this iteration."""
        self._asked_for: dict[int, weakref.ref[Value]] = {}
        """The same of this iteration: what was made after gradients that had a graph, once that is done, for as long as somebody asks for it."""
        self._after_gradients: set[int] | None = None
        """Storage addresses of the values that were made since a backward call made a graph; None: no call has."""
        self._older: dict[int, weakref.ref[Value]] = {}
        """The same of iterations before, for as long as a graph asks for them. To this one they are tensors from before, as to the
        profile: records that stood on a carried hidden state's value would hold all of the past."""
        self._pins: dict[int, list[weakref.ref[Record]]] = {}
        """Storage address -> records that hold it as a source."""
        self._encoded: dict[int, tuple[weakref.ref[UntypedStorage], int, weakref.ref[Encoded]]] = {}
        """Storage address -> the storage, the version that a codec holds of it, and what it holds."""
        self._swapped: dict[int, tuple[weakref.ref[UntypedStorage], int, weakref.ref[SwappedStorage]]] = {}
        """The same of tiers."""

        self.tier: SwapTier[Any] | None = None
        """Where what is made in a step, before it changes parameters, waits for a backward that may never come."""
        self.kept: Kept | None = None
        """Told of what a replay makes and holds."""
        self.whole_first: Callable[[Tensor, object], None] | None = None
        """Told before a replay reads what is held as it is, and which of its ops does."""

    @property
    def holds_sources(self) -> bool:
        """Do records hold tensors that somebody may change?"""
        return bool(self._pins)

    @property
    def any_live(self) -> bool:
        """May a graph still ask for any, or be made of what may change?"""
        return bool(self._pins or self._older or self._values or self._asked_for)

    @property
    def makes_graph(self) -> bool:
        """Does a backward call run that makes a graph of its own?"""
        return self._thread.backward_makes_graph

    def freeze(self, tensor: Tensor) -> View | Pinned:
        """What a record holds of an argument, a strided one: a view of a value that can be made again, or the tensor itself."""
        storage = storage_of(tensor)
        value = self.value_in(tensor, storage)
        if value is not None:
            return View(value, Place.of(tensor))
        pinned = Pinned(tensor)
        pinned.whole = self.whole_first
        encoded = self.encoded_form(storage, pinned.version)
        held = encoded if encoded is not None else self._copy_of(storage, pinned.version)
        if held is not None:
            pinned.read_from(held)
        return pinned

    def encoded_form(self, storage: UntypedStorage, version: int) -> Encoded | None:
        """What a codec holds of `storage` in this version."""
        known = self._encoded.get(storage._cdata)
        if known is None or known[0]() is not storage or known[1] != version:
            return None
        return known[2]()

    def is_encoded(self, storage: UntypedStorage, version: int, encoded: Encoded) -> None:
        """A codec holds `storage`: records that pinned it as a source read it from there, and let go of the bytes."""
        self._encoded[storage._cdata] = (weakref.ref(storage), version, weakref.ref(encoded))
        for reference in self._pins.pop(storage._cdata, ()):
            record = reference()
            for argument in record.args if record is not None else ():
                if not isinstance(argument, Pinned) or not argument.holds(storage):
                    continue
                if argument.version == version:
                    argument.read_from(encoded)
                else:
                    self._pins.setdefault(storage._cdata, []).append(reference)

    def is_swapped(self, tensor: Tensor, swapped: SwappedStorage) -> None:
        """A tier copies the storage of `tensor`: what is to be made from it reads it from there, and lets go of the bytes.

        Until it has left, the copy is the storage itself, so that records still count as standing on it when it is written.
        """
        storage, version = storage_of(tensor), version_of(tensor)
        self._swapped[storage._cdata] = (weakref.ref(storage), version, weakref.ref(swapped))
        value = self.value_in(tensor, storage)
        if value is not None:
            value.elsewhere = weakref.ref(swapped)
        for reference in self._pins.get(storage._cdata, ()):
            record = reference()
            for argument in record.args if record is not None else ():
                if isinstance(argument, Pinned) and argument.holds(storage) and argument.version == version:
                    argument.read_from(swapped)

    def _copy_of(self, storage: UntypedStorage, version: int) -> SwappedStorage | None:
        """The swap of `storage` in this version that somebody will ask for."""
        known = self._swapped.get(storage._cdata)
        if known is None or known[0]() is not storage or known[1] != version:
            return None
        return known[2]()

    def value_in(self, tensor: Tensor, storage: UntypedStorage) -> Value | None:
        """The recorded value that `tensor` shows; None when no op was seen that made it as it is now."""
        address = storage._cdata
        value = self._values.get(address) or _living(self._asked_for, address)
        known = value if value is not None else _living(self._older, address)
        if known is None or known.storage is None or known.storage() is not storage:
            return None
        if version_of(tensor) > known.version:  # written by a kernel that no mode sees
            self.overwritten([storage])
            return None
        return value

    def remember(self, record: Record, flat: list[Any], out: Any) -> None:
        """`record` has run, on the arguments `flat`, and gave `out`: its results are values from here on."""
        for position in record.written:
            argument = record.args[position]
            if isinstance(argument, View):
                storage = storage_of(flat[position])
                self._new_value(record, -1 - position, storage, version_of(flat[position]) + 1)
        taken = {  # storages that are not new
            storage_of(t)._cdata for t in flat if isinstance(t, Tensor) and t.layout is torch.strided
        }
        for place, tensor in enumerate(output_tensors(out)):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = storage_of(tensor)
                if storage._cdata not in taken:
                    taken.add(storage._cdata)
                    self._new_value(record, place, storage, version_of(tensor))
        self._pin(record)

    def made_again(self, value: Value, tensor: Tensor) -> None:
        """`tensor` shows `value`, which a replay has made: a backward call that makes a graph may save it once more, and what that computes
        from it reads this value."""
        storage = storage_of(tensor)
        if self._values.get(storage._cdata) is not value:
            value.storage = lives = _Address(storage, self._died)
            value.version = version_of(tensor)
            self._holds(lives.address, value)

    def remember_source(self, record: Record, source: Tensor) -> None:
        """`record`, a copy of a copy, makes `source` again, as it is now."""
        self._new_value(record, 0, storage_of(source), version_of(source))
        self._pin(record)

    def _pin(self, record: Record) -> None:
        for position, argument in enumerate(record.args):
            address = argument.address if type(argument) is Pinned else None
            if address is not None and position not in record.updated:
                self._pins.setdefault(address, []).append(weakref.ref(record))

    def _new_value(self, record: Record, place: int, storage: UntypedStorage, version: int) -> None:
        lives = _Address(storage, self._died)
        value = Value(record, place, lives, version)
        record.values.append(weakref.ref(value))
        self._holds(lives.address, value)

    def _holds(self, address: int, value: Value) -> None:
        self._values[address] = value
        if self._after_gradients is not None:
            self._after_gradients.add(address)

    def _storage_died(self, gone: _Address) -> None:
        address = gone.address
        value = self._values.get(address)
        if value is not None and value.storage is gone:
            del self._values[address]
        for known in (self._asked_for, self._older):
            if known:
                value = _living(known, address)
                if value is None or value.storage is gone:
                    known.pop(address, None)

    def about_to_write(
        self, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record | None
    ) -> list[UntypedStorage]:
        """Storages that the op writes; whatever was to be made from their present bytes is made now."""
        storages = []
        for position, name in zip(kind.writes, kind.write_names, strict=True):
            given = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tensors_in((given,)):
                if tensor.layout is torch.strided and type(tensor) in PLAIN_TYPES:
                    storages.append(storage_of(tensor))
        for storage in storages:
            self.source_changes(storage._cdata, but=record)
        return storages

    def source_changes(self, address: int, *, but: Record | None = None, kept: Kept | None = None) -> None:
        """The bytes at `address` are about to change: records that hold them as a source run now and keep their results. `kept` is told of these."""
        for reference in self._pins.pop(address, ()):
            record = reference()
            if record is None or record is but or not record.stands_on(address):
                continue
            for value in (v for ref in record.values if (v := ref()) is not None):
                if value.sent is None and (value.there() is None or value.cached is None):
                    value.cached = make(value, kept or self.kept)
                    if kept is not None:
                        kept(value)

    def overwritten(self, storages: Sequence[UntypedStorage]) -> None:
        """The storages hold other bytes now; their former values have to be made again where they are wanted."""
        for storage in storages:
            address = storage._cdata
            weak = [_living(known, address) for known in (self._asked_for, self._older)]
            for value in (self._values.pop(address, None), *weak):
                if value is not None:
                    value.storage = value.elsewhere = None
            self._asked_for.pop(address, None)
            self._older.pop(address, None)

    def will_be_rewritten(self, tensor: Tensor) -> None:
        """A kernel that nobody sees into gets `tensor` and may write it: what needs its present bytes is made now."""
        if is_plain(tensor):
            self.source_changes(storage_of(tensor)._cdata)

    def will_be_stepped(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer steps them, after backward: who still needs their present bytes is a graph that lives on (an evaluation's, whose result a
        variable holds), and may be for long. What is made for it leaves again."""
        made: list[Value] = []
        for parameter in filter(is_plain, parameters):
            self.source_changes(storage_of(parameter)._cdata, kept=made.append)
            while made:
                self._send(made.pop())

    def _send(self, value: Value) -> None:
        is_large = value.cached is not None and value.cached.nbytes() >= LEAST_BYTES
        if self.tier is not None and is_large and value.waiting > 0:
            with contextlib.suppress(SwapFailed):
                value.send(self.tier)
            self.tier.collect()

    def rewritten_unseen(self, tensor: Tensor) -> None:
        """A kernel that nobody sees into has changed `tensor`: what was recorded made another value."""
        if is_plain(tensor):
            self.overwritten([storage_of(tensor)])

    def pins(self, address: int) -> bool:
        """May records hold aliases of the storage at `address`?"""
        return address in self._pins

    def pins_of(self, storage: UntypedStorage) -> int:
        """How many aliases of `storage` the records hold."""
        records = [record for each in self._pins.get(storage._cdata, ()) if (record := each()) is not None]
        arguments = {id(a): a for record in records for a in record.args if isinstance(a, Pinned)}
        return sum(each.holds(storage) for each in arguments.values())

    def will_be_resized(self, storage: UntypedStorage) -> None:
        """Its owner (FSDP) frees or refills `storage`: what needs its present bytes is made now."""
        if self._thread.is_here and (self._pins or self._values or self._asked_for or self._older):
            self.source_changes(storage._cdata)
            self.overwritten([storage])

    def gradients_begin(self) -> None:
        """A backward call begins that makes a graph."""
        if self._after_gradients is None:
            self._after_gradients = set()

    def gradients_end(self) -> None:
        """A backward call begins that makes none. What has been made since the other one (gradients, and weights of the next inner step) may
        live on in the script's variables; what that was made of is held no longer than somebody asks for it."""
        for address in self._after_gradients or ():
            value = self._values.pop(address, None)
            if value is not None:
                self._asked_for[address] = weakref.ref(value)
        self._after_gradients = None

    def new_iteration(self) -> None:
        """Forget what ended with the iteration."""
        self._encoded.clear()
        self._swapped.clear()
        values = {address: weakref.ref(value) for address, value in self._values.items()}
        older = self._older | self._asked_for | values
        self._values.clear()
        self._asked_for.clear()
        self._after_gradients = None
        self._older = {a: ref for a, ref in older.items() if ref() is not None}
        self._pins = {
            a: live for a, refs in self._pins.items() if (live := [r for r in refs if r() is not None])
        }


def _living(known: dict[int, weakref.ref[Value]], address: int) -> Value | None:
    reference = known.get(address) if known else None
    return reference() if reference is not None else None
