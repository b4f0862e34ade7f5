"""Ops remembered in forward so that what they made can be made again in backward (`replays`): tensor-granular recomputation.

A record holds the overload, its arguments and the generator's state. A tensor argument is a *view of a value* when its
producer was recorded too, and is pinned (held) otherwise, as it is or as a codec or a tier holds it for others. A value is one version
of a storage; it is *there* while its storage lives in that version, while a replay's result waits for its last consumer, or while a
tier holds it for somebody who will still ask: it is brought back then.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, UntypedStorage

from memopt.enforcers.codecs.encoded import Encoded
from memopt.enforcers.codecs.table import decode
from memopt.enforcers.flat_call import CallForm
from memopt.enforcers.kernel_settings import SETTINGS, Settings
from memopt.enforcers.tiers.swap import SwapTier
from memopt.enforcers.tiers.swapped import SwappedStorage
from memopt.instrument.ops import OpKind
from memopt.instrument.saved import Place, let_go_of_bytes
from memopt.instrument.torch_internals import DispatchKey, ExcludeKey, storage_of, tree_leaves

_numbers = itertools.count()
_number_of = attrgetter("number")
_KEEPS_VERSION = DispatchKey.ADInplaceOrView
_NONE: frozenset[int] = frozenset()


class View(Struct, frozen=True, gc=False):
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
        self.whole: Callable[[Tensor, object], None] | None = None
        """Told before somebody reads the tensor, and who, where weights may be away."""
        self.place: Place | None = None
        """Of a tensor that a codec or a tier holds."""

    @property
    def is_changed(self) -> bool:
        """Was it changed in place since the op read it?"""
        seen = self.tensor if self.tensor is not None else self.witness
        return seen is not None and seen._version != self.version

    @property
    def size(self) -> tuple[int, ...]:
        """Its shape."""
        if self.tensor is not None:
            return tuple(self.tensor.shape)
        return self.place.size if self.place is not None else ()

    def holds(self, storage: UntypedStorage) -> bool:
        return self.tensor is not None and storage_of(self.tensor)._cdata == storage._cdata

    @property
    def address(self) -> int | None:
        """Of the storage that it reads, while that is there; None where a codec or a tier has the bytes alone."""
        alive = self.swapped.source() if self.swapped is not None else None
        storage = storage_of(self.tensor) if self.tensor is not None else alive
        found: int | None = storage._cdata if storage is not None else None
        return found

    def read_from(self, held: Encoded | SwappedStorage) -> None:
        """Hold what a codec made of the whole storage, or the copy in a tier, in the version that the op read, in place of the bytes."""
        alias, self.tensor = self.tensor, None
        if alias is not None:
            self.place = Place.of(alias)
        if isinstance(held, Encoded):
            self.encoded = held
            return
        self.swapped, self.witness = held, alias
        if alias is not None:
            let_go_of_bytes(alias)

    def get(self, reader: object = None) -> Tensor:
        """The tensor; decoded, it is the caller's own."""
        if self.tensor is not None:
            if self.whole is not None:
                self.whole(self.tensor, reader)
            return self.tensor
        assert self.place is not None
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
        "each",
        "elsewhere",
        "given",
        "number",
        "place",
        "record",
        "sent",
        "storage",
        "version",
        "waiting",
    )

    def __init__(
        self, record: Record, place: int, storage: weakref.ref[UntypedStorage], version: int
    ) -> None:
        self.record = record
        self.number = next(_numbers)
        """How many values were made before."""
        self.version = version
        """What the version counter of its tensors says as long as they hold this value."""
        self.place = place
        """Index among the outputs, or -1 - (position in the flat arguments) when written in place."""
        self.storage: weakref.ref[UntypedStorage] | None = storage
        """The storage that forward made; None once it is gone or has been overwritten."""
        self.cached: UntypedStorage | None = None
        """Made again, and held for those who still wait."""
        self.given: weakref.ref[UntypedStorage] | None = None
        """What the last handle was served with: backward holds it for a while, and only reads it."""
        self.elsewhere: weakref.ref[SwappedStorage] | None = None
        """A tier holds it for others."""
        self.sent: SwappedStorage | None = None
        """A tier holds it for those who still wait: made again in a step, for a graph that lives on."""
        self.waiting = 0
        """Handles that have not been served."""
        self.again = False
        """Not held when it is made on the way to another value."""
        self.each = False
        """Not held from one handle that asks to the next."""

    @property
    def here(self) -> UntypedStorage | None:
        """What holds it on the device now."""
        if self.cached is not None:
            return self.cached
        given = self.given() if self.given is not None else None
        if given is not None:
            return given
        return self.storage() if self.storage is not None else None

    def there(self) -> UntypedStorage | None:
        """The same, or what a tier gives back."""
        here = self.here
        if here is not None:
            return here
        swapped = self.elsewhere() if self.elsewhere is not None else None
        return swapped.get() if swapped is not None and swapped.waiting > 0 else None

    def send(self, tier: SwapTier[Any]) -> None:
        """What is cached leaves for `tier` until somebody asks. Raises `SwapFailed`; it stays then."""
        assert self.cached is not None
        sent = SwappedStorage(tier, self.cached)
        sent.wait_until_away()
        sent.waiting = 1
        self.sent, self.elsewhere, self.cached = sent, weakref.ref(sent), None

    def serve(self, storage: UntypedStorage, *, first: bool, only_read: bool) -> None:
        """A handle has been served with `storage`, for the `first` time or again. After the last, what was made again lives as long as backward
        holds it."""
        self.waiting -= first
        if self.waiting <= 0 or self.each:
            self.cached = self.sent = None
            self.given = weakref.ref(storage) if only_read else None


class Record:
    """One op that can run again."""

    __slots__ = (
        "__weakref__",
        "args",
        "form",
        "func",
        "grad",
        "kind",
        "rng",
        "settings",
        "updated",
        "values",
        "written",
    )

    def __init__(
        self,
        func: Any,
        kind: OpKind,
        args: list[Any],
        form: CallForm,
        rng: tuple[Any, Tensor] | None,
        settings: Settings,
    ) -> None:
        self.func = func
        self.kind = kind
        self.args = args
        self.form = form
        self.rng = rng
        self.grad = torch.is_grad_enabled()
        """Some kernels ask for the grad mode."""
        self.settings = settings
        statistics = kind.statistics or kind.unread
        self.updated = _statistics_positions(statistics, form, args) if statistics is not None else _NONE
        """Flat positions of running statistics, which the call moves on or passes over; its outputs do not depend on them."""
        self.written = (
            _written_positions(kind, form, len(args)) | self.updated if kind.writes else self.updated
        )
        """Flat positions of arguments that the op writes: a replay gives it private copies."""
        self.values: list[weakref.ref[Value]] = []

    def writes_unrecorded(self) -> bool:
        """Does it write in place what no record can make again? Then it cannot be replayed."""
        return bool(self.written) and any(
            not isinstance(self.args[position], View) for position in self.written - self.updated
        )

    def stands_on(self, address: int) -> bool:
        """Is what lies at `address` an argument that it reads from there?"""
        return any(isinstance(each, Pinned) and each.address == address for each in self.args)

    def sources(self) -> list[Value]:
        """The values that it reads, in the order in which they were made: the simulator walks in this order, too."""
        found = [argument.value for argument in self.args if type(argument) is View]
        return sorted(found, key=_number_of) if len(found) > 1 else found


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


@contextmanager
def rewound(generator: Any, state: Tensor) -> Iterator[None]:
    """`generator` gives in here what it gave from `state` on, and goes on afterwards as if nothing had been drawn.

    A CUDA generator changes hands by `graphsafe_set_state`: `set_state` lets cuDNN's next recurrent layer seed its dropout anew
    (`no_reset_rnn_state_` in torch's CUDAGeneratorImpl.cpp), so the iterations that follow would draw other numbers.
    """
    if generator.device.type == "cuda":
        put, now, then = (
            generator.graphsafe_set_state,
            generator.graphsafe_get_state(),
            generator.clone_state(),
        )
        then.set_state(state)
    else:
        put, now, then = generator.set_state, generator.get_state(), state
    put(then)
    try:
        yield
    finally:
        put(now)


def _written_positions(kind: OpKind, form: CallForm, count: int) -> frozenset[int]:
    if not form.lists:  # the flat positions are the call's own
        if kind.writes[-1] < form.positional:
            return frozenset(kind.writes)
        named = {name: form.positional + at for at, name in enumerate(form.names)}
        places = zip(kind.writes, kind.write_names, strict=True)
        taken = [at if at < form.positional else named.get(name) for at, name in places]
        return frozenset(at for at in taken if at is not None)
    args, kwargs = form.rebuild(list(range(count)))
    found: set[int] = set()
    for position, name in zip(kind.writes, kind.write_names, strict=True):
        given = args[position] if position < len(args) else kwargs.get(name)
        found.update(leaf for leaf in tree_leaves(given) if leaf is not None)
    return frozenset(found)


def _statistics_positions(
    positions: tuple[int, int, int | None], form: CallForm, flat: list[Any]
) -> frozenset[int]:
    """Where the statistics lie that the call updates, or is given without need; none in evaluation mode, which only reads them."""
    args, _ = form.rebuild(list(range(len(flat))))
    mean, variance, training = positions
    if training is not None and not flat[args[training]]:
        return _NONE
    return frozenset({args[mean], args[variance]})


def record_op(
    func: Any,
    kind: OpKind,
    flat: list[Any],
    form: CallForm,
    freeze: Callable[[Tensor], View | Pinned],
) -> Record:
    """Remember a call before it runs; `freeze` says what to hold of each tensor argument."""
    rng = generator_state(flat) if kind.random else None
    alone = kind.one_by_one and isinstance(flat[0], Tensor) and flat[0].is_cuda
    settings = SETTINGS.of_one_by_one() if alone else SETTINGS.now()
    args = [freeze(a) if isinstance(a, Tensor) else a for a in flat]
    return Record(func, kind, args, form, rng, settings)


def output_tensors(out: Any) -> list[Any]:
    """Outputs in the order in which a replay counts them."""
    if not isinstance(out, (tuple, list)):
        return [out]
    found: list[Any] = []
    for part in out:
        if isinstance(part, (tuple, list)):
            found += part
        else:
            found.append(part)
    return found
