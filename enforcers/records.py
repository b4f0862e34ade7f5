"""Ops remembered in forward so that what they made can be made again in backward: tensor-granular recomputation.

A record holds the overload, its arguments and the generator's state. A tensor argument is a *view of a value* when its
producer was recorded too, and is pinned (held) otherwise, as it is or as a codec or a tier holds it for others. A value is one version
of a storage; it is *there* while its storage lives in that version, while a replay's result waits for its last consumer, or while a
tier holds it for somebody who will still ask: it is brought back then.

Making a value walks its records depth first, runs each once, frees what nobody waits for as soon as it was read
(`estimators.chains` and `estimators.timeline` do the same walk on the trace). In-place ops write on private copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.enforcers.codecs.encoded import Encoded
from memopt.enforcers.codecs.table import decode
from memopt.enforcers.flat_call import CallForm
from memopt.enforcers.tiers.swapped import SwappedStorage
from memopt.instrument.ops import OpKind
from memopt.instrument.saved import Place, let_go_of_bytes
from memopt.instrument.torch_internals import (
    BelowAutograd,
    DisableAutocast,
    DispatchKey,
    ExcludeKey,
    disable_current_modes,
    tree_leaves,
)

_KEEPS_VERSION = DispatchKey.ADInplaceOrView


class CannotReplay(RuntimeError):
    """A source of a replay was changed behind memopt's back: the value is lost, and a wrong one is never handed out."""


@dataclass(slots=True)
class View:
    """A tensor that shows a value, and where it lies in it."""

    value: Value
    place: Place


class Pinned:
    """An argument that is held: an alias and the version that the op read, or its storage as a codec or a tier has it."""

    __slots__ = ("encoded", "place", "swapped", "tensor", "version", "whole", "witness")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        with ExcludeKey(_KEEPS_VERSION, False):
            self.tensor: Tensor | None = tensor.detach()
        self.encoded: Encoded | None = None
        self.swapped: SwappedStorage | None = None
        self.witness: Tensor | None = None
        """Shares the version counter of what a tier holds, but none of its bytes."""
        self.whole: Callable[[Tensor], None] | None = None
        """Told before somebody reads the tensor, where weights may be away."""
        self.place = Place.of(tensor)

    @property
    def is_changed(self) -> bool:
        """Was it changed in place since the op read it?"""
        seen = self.tensor if self.tensor is not None else self.witness
        return seen is not None and seen._version != self.version

    def holds(self, storage: UntypedStorage) -> bool:
        return self.tensor is not None and self.tensor.untyped_storage()._cdata == storage._cdata

    @property
    def address(self) -> int | None:
        """Of the storage that it reads, while that is there; None where a codec or a tier has the bytes alone."""
        alive = self.swapped.source() if self.swapped is not None else None
        storage = self.tensor.untyped_storage() if self.tensor is not None else alive
        found: int | None = storage._cdata if storage is not None else None
        return found

    def read_from(self, held: Encoded | SwappedStorage) -> None:
        """Hold what a codec made of the whole storage, or the copy in a tier, in the version that the op read, in place of the bytes."""
        alias, self.tensor = self.tensor, None
        if isinstance(held, Encoded):
            self.encoded = held
            return
        self.swapped, self.witness = held, alias
        if alias is not None:
            let_go_of_bytes(alias)

    def get(self) -> Tensor:
        """The tensor; decoded, it is the caller's own."""
        if self.tensor is not None:
            if self.whole is not None:
                self.whole(self.tensor)
            return self.tensor
        if self.swapped is not None:
            return self.place.on(self.swapped.get())
        assert self.encoded is not None
        return self.place.on(decode(self.encoded).untyped_storage())


class Value:
    """One version of a storage, made by a recorded op."""

    __slots__ = (
        "__weakref__",
        "again",
        "cached",
        "elsewhere",
        "given",
        "place",
        "record",
        "storage",
        "version",
        "waiting",
    )

    def __init__(self, record: Record, place: int, storage: UntypedStorage, version: int) -> None:
        self.record = record
        self.version = version
        """What the version counter of its tensors says as long as they hold this value."""
        self.place = place
        """Index among the outputs, or -1 - (position in the flat arguments) when written in place."""
        self.storage: weakref.ref[UntypedStorage] | None = weakref.ref(storage)
        """The storage that forward made; None once it is gone or has been overwritten."""
        self.cached: UntypedStorage | None = None
        """Made again, and held for those who still wait."""
        self.given: weakref.ref[UntypedStorage] | None = None
        """What the last handle was served with: backward holds it for a while, and only reads it."""
        self.elsewhere: weakref.ref[SwappedStorage] | None = None
        """A tier holds it for others."""
        self.waiting = 0
        """Handles that have not been served."""
        self.again = False
        """Not held when it is made on the way to another value."""

    def there(self) -> UntypedStorage | None:
        if self.cached is not None:
            return self.cached
        given = self.given() if self.given is not None else None
        if given is not None:
            return given
        here = self.storage() if self.storage is not None else None
        if here is not None:
            return here
        swapped = self.elsewhere() if self.elsewhere is not None else None
        return swapped.get() if swapped is not None and swapped.waiting > 0 else None

    def serve(self, storage: UntypedStorage, *, only_read: bool) -> None:
        """One more handle has been served, with `storage`. After the last, what was made again lives as long as backward holds it."""
        self.waiting -= 1
        if self.waiting <= 0:
            self.cached = None
            self.given = weakref.ref(storage) if only_read else None


class Record:
    """One op that can run again."""

    __slots__ = ("__weakref__", "args", "form", "func", "grad", "kind", "rng", "updated", "values", "written")

    def __init__(
        self, func: Any, kind: OpKind, args: list[Any], form: CallForm, rng: tuple[Any, Tensor] | None
    ) -> None:
        self.func = func
        self.kind = kind
        self.args = args
        self.form = form
        self.rng = rng
        self.grad = torch.is_grad_enabled()
        """Some kernels ask for the grad mode."""
        self.updated = _statistics_positions(kind, form, args)
        """Flat positions of running statistics that the call moves on; its outputs do not depend on them."""
        self.written = _written_positions(kind, form, len(args)) | self.updated
        """Flat positions of arguments that the op writes: a replay gives it private copies."""
        self.values: list[weakref.ref[Value]] = []

    def writes_unrecorded(self) -> bool:
        """Does it write in place what no record can make again? Then it cannot be replayed."""
        return any(not isinstance(self.args[position], View) for position in self.written - self.updated)

    def stands_on(self, address: int) -> bool:
        """Is what lies at `address` an argument that it reads from there?"""
        return any(isinstance(each, Pinned) and each.address == address for each in self.args)

    def sources(self) -> Iterator[Value]:
        for argument in self.args:
            if isinstance(argument, View):
                yield argument.value


def generator_state(args: list[Any]) -> tuple[Any, Tensor]:
    """The generator that an op with these flat arguments draws from, and its state now.

    A device that is named (`torch.rand(3, device="cuda")`, `torch.randn_like(x, device="cpu")`) goes before that of the tensors;
    one without an index is the current one.
    """
    generator = next((a for a in args if isinstance(a, torch.Generator)), None)
    if generator is None:
        named = (a for a in args if isinstance(a, torch.device))
        theirs = (a.device for a in args if isinstance(a, Tensor))
        device = next(named, None) or next(theirs, torch.device("cpu"))
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        else:
            generator = torch.default_generator
    return generator, generator.get_state()


def make(value: Value) -> UntypedStorage:
    """The storage of `value`, made again if it is not there. Bit for bit what forward made.

    Raises `CannotReplay` when a pinned source was changed in place since forward.
    """
    found = value.there()
    if found is not None:
        return found
    order = _order(value)
    with DisableAutocast(), disable_current_modes(), BelowAutograd():
        return _Replay(order, value).run()


def _order(value: Value) -> list[Record]:
    """Records to run, inputs first, each once."""
    order: list[Record] = []
    seen: set[int] = set()
    stack: list[tuple[Value, bool]] = [(value, False)]
    while stack:
        wanted, expanded = stack.pop()
        record = wanted.record
        if expanded:
            if id(record) not in seen:
                seen.add(id(record))
                order.append(record)
            continue
        if id(record) in seen or wanted.there() is not None:
            continue
        stack.append((wanted, True))
        stack.extend((source, False) for source in reversed(list(record.sources())))
    return order


class _Replay:
    """One walk: what it has made so far and how often each value is still to be read."""

    def __init__(self, order: list[Record], target: Value) -> None:
        self._order = order
        self._target = target
        self._made: dict[int, UntypedStorage] = {}
        self._reads: dict[int, int] = {id(target): 1}
        for record in order:
            for source in record.sources():
                self._reads[id(source)] = self._reads.get(id(source), 0) + 1

    def run(self) -> UntypedStorage:
        for record in self._order:
            self._run(record)
        found = self._made.get(id(self._target))
        if found is None:
            found = self._target.there()
        assert found is not None
        return found

    def _run(self, record: Record) -> None:
        flat = [self._argument(record, position, argument) for position, argument in enumerate(record.args)]
        args, kwargs = record.form.rebuild(flat)
        out = self._call(record, args, kwargs)
        outputs = list(_tensors(out))
        for reference in record.values:
            value = reference()
            if value is None:
                continue
            tensor = outputs[value.place] if value.place >= 0 else flat[-1 - value.place]
            if not isinstance(tensor, Tensor):
                raise CannotReplay(
                    f"memopt cannot compute {record.kind.name} again: the second run gave no such output"
                )
            self._keep(value, tensor.untyped_storage())

    @staticmethod
    def _call(record: Record, args: Any, kwargs: Any) -> Any:
        with torch.set_grad_enabled(record.grad):
            if record.rng is None:
                return record.func(*args, **kwargs)
            generator, state = record.rng
            now = generator.get_state()
            generator.set_state(state)
            try:
                return record.func(*args, **kwargs)
            finally:
                generator.set_state(now)

    def _keep(self, value: Value, storage: UntypedStorage) -> None:
        if value.waiting > 0 and value.there() is None and (value is self._target or not value.again):
            value.cached = storage
        if self._reads.get(id(value), 0) > 0:
            self._made[id(value)] = storage

    def _argument(self, record: Record, position: int, argument: Any) -> Any:
        written = position in record.written
        if isinstance(argument, Pinned):
            if argument.is_changed and not written:
                raise _changed(record, argument)
            tensor = argument.get()
            return _private(tensor) if written and argument.encoded is None else tensor
        if not isinstance(argument, View):
            return argument
        value = argument.value
        self._reads[id(value)] -= 1
        last = self._reads[id(value)] == 0
        mine = self._made.pop(id(value), None) if last else self._made.get(id(value))
        storage = mine if mine is not None else value.there()
        assert storage is not None
        tensor = argument.place.on(storage)
        if written and (mine is None or not last or value.cached is not None):
            return _private(tensor)
        return tensor


def _written_positions(kind: OpKind, form: CallForm, count: int) -> frozenset[int]:
    if not kind.writes:
        return frozenset()
    args, kwargs = form.rebuild(list(range(count)))
    found: set[int] = set()
    for position, name in zip(kind.writes, kind.write_names, strict=True):
        given = args[position] if position < len(args) else kwargs.get(name)
        found.update(leaf for leaf in tree_leaves(given) if leaf is not None)
    return frozenset(found)


def _statistics_positions(kind: OpKind, form: CallForm, flat: list[Any]) -> frozenset[int]:
    """Where the statistics lie that the call updates; none in evaluation mode, which only reads them."""
    if kind.statistics is None:
        return frozenset()
    args, _ = form.rebuild(list(range(len(flat))))
    mean, variance, training = kind.statistics
    if training is not None and not flat[args[training]]:
        return frozenset()
    return frozenset({args[mean], args[variance]})


def _private(tensor: Tensor) -> Tensor:
    """The same view on a copy of the whole storage."""
    return Place.of(tensor).on(tensor.untyped_storage().clone())


def _tensors(out: Any) -> Iterator[Any]:
    if isinstance(out, (tuple, list)):
        for part in out:
            if isinstance(part, (tuple, list)):
                yield from part
            else:
                yield part
    else:
        yield out


def _changed(record: Record, argument: Pinned) -> CannotReplay:
    return CannotReplay(
        f"memopt cannot compute {record.kind.name} again: its input {argument.place.size} was changed in place "
        "after forward, outside of what memopt watches. Nothing wrong was computed; profile the script again, "
        "or advise without recompute (--deny recompute)"
    )


def record_op(
    func: Any,
    kind: OpKind,
    flat: list[Any],
    form: CallForm,
    freeze: Callable[[Tensor], View | Pinned],
) -> Record:
    """Remember a call before it runs; `freeze` says what to hold of each tensor argument."""
    rng = generator_state(flat) if kind.random else None
    return Record(func, kind, [freeze(a) if isinstance(a, Tensor) else a for a in flat], form, rng)


def output_tensors(out: Any) -> list[Any]:
    """Outputs in the order in which a replay counts them."""
    return list(_tensors(out))
