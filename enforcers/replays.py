"""Values made again, from the records of what made them.

A walk runs the records depth first, each once, and frees what nobody waits for as soon as it was read (`estimators.simulator.chains` and
`estimators.simulator.replays` do the same walk on the trace). In-place ops write on private copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.enforcers.kernel_settings import SETTINGS, Settings
from memopt.enforcers.records import Pinned, Record, Value, View, output_tensors, rewound
from memopt.instrument.saved import Place
from memopt.instrument.torch_internals import (
    BelowAutograd,
    DisableAutocast,
    DisableTorchDispatch,
    storage_of,
)


class CannotReplay(RuntimeError):
    """A source of a replay was changed behind memopt's back: the value is lost, and a wrong one is never handed out."""


Kept = Callable[[Value], None]


def make(value: Value, kept: Kept | None = None) -> UntypedStorage:
    """The storage of `value`, made again if it is not there. Bit for bit what forward made. `kept` is told of what is held for others.

    Raises `CannotReplay` when a pinned source was changed in place since forward.
    """
    found = value.there()
    if found is None:
        made = _run_again(value, kept)
        found = storage_of(made) if made is not None else value.there()
    assert found is not None
    return found


def show(value: Value, place: Place, kept: Kept | None = None) -> Tensor:
    """The tensor at `place` of what `make` gives."""
    made = _run_again(value, kept) if value.there() is None else None
    if made is None:
        return place.on(make(value, kept))
    return made if place.is_of(made) else place.on(storage_of(made))


def _run_again(value: Value, kept: Kept | None) -> Tensor | None:
    """A tensor that shows it; None where it is there by now."""
    replay = _Replay(value, kept)
    grad, settings = torch.is_grad_enabled(), SETTINGS.now()
    guard = DisableTorchDispatch()
    try:
        with DisableAutocast(), BelowAutograd():
            return replay.run(grad, settings)
    finally:
        del guard
        torch.set_grad_enabled(grad)
        if replay.switched:
            SETTINGS.switch(settings)


class _Replay:
    """One walk: what it has made so far and how often each value is still to be read."""

    def __init__(self, target: Value, kept: Kept | None) -> None:
        self._target, self._kept = target, kept
        self._made: dict[int, Tensor] = {}
        """By the values' ids: tensors that show them, as their ops gave them."""
        self._reads: dict[int, int] = {id(target): 1}
        self._order = self._records()
        self.switched = False
        """Settings of the process may not be what they were."""

    def _records(self) -> list[Record]:
        """Records to run, inputs first, each once. Counts who reads what."""
        order: list[Record] = []
        seen: set[int] = set()
        stack: list[tuple[Value, list[Value] | None]] = [(self._target, None)]
        reads = self._reads
        while stack:
            wanted, sources = stack.pop()
            record = wanted.record
            if id(record) in seen:
                continue
            if sources is not None:
                seen.add(id(record))
                order.append(record)
                for source in sources:
                    reads[id(source)] = reads.get(id(source), 0) + 1
            elif wanted.there() is None:
                sources = record.sources()
                stack.append((wanted, sources))
                for source in reversed(sources):
                    stack.append((source, None))
        return order

    def run(self, grad: bool, settings: Settings) -> Tensor | None:
        """Under the records' own settings; these are the ones of now."""
        for record in self._order:
            if record.grad is not grad:
                grad = record.grad
                torch.set_grad_enabled(grad)
            if record.settings is not settings:
                settings = record.settings
                self.switched = True
                SETTINGS.switch(settings)
            self._run(record)
        return self._made.get(id(self._target))

    def _run(self, record: Record) -> None:
        flat = [self._argument(record, position, argument) for position, argument in enumerate(record.args)]
        args, kwargs = record.form.rebuild(flat)
        out = record.func(*args, **kwargs) if record.rng is None else _draw_again(record, args, kwargs)
        outputs = output_tensors(out)
        for reference in record.values:
            value = reference()
            if value is None:
                continue
            tensor = outputs[value.place] if value.place >= 0 else flat[-1 - value.place]
            if not isinstance(tensor, Tensor):
                raise CannotReplay(
                    f"memopt cannot compute {record.kind.name} again: the second run gave no such output"
                )
            self._keep(value, tensor)

    def _keep(self, value: Value, tensor: Tensor) -> None:
        held = value is self._target or not value.again
        if value.waiting > 0 and value.there() is None and held and not value.each:
            value.cached = storage_of(tensor)
            if self._kept is not None:
                self._kept(value)
        if self._reads.get(id(value), 0) > 0:
            self._made[id(value)] = tensor

    def _argument(self, record: Record, position: int, argument: Any) -> Any:
        if type(argument) is View:
            return self._value(argument, written=position in record.written)
        if type(argument) is not Pinned:
            return argument
        written = position in record.written
        if argument.is_changed and not written:
            raise _changed(record, argument)
        tensor = argument.get(record)
        return _private(tensor) if written and argument.encoded is None else tensor

    def _value(self, view: View, *, written: bool) -> Tensor:
        value = view.value
        left = self._reads[id(value)] = self._reads[id(value)] - 1
        mine = self._made.get(id(value)) if left else self._made.pop(id(value), None)
        if mine is not None and view.place.is_of(mine):
            tensor = mine
        else:
            storage = storage_of(mine) if mine is not None else value.there()
            assert storage is not None
            tensor = view.place.on(storage)
        if written and (mine is None or left or value.cached is not None):
            return _private(tensor)
        return tensor


def _draw_again(record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op of `record` with the random numbers that it drew in forward."""
    assert record.rng is not None
    with rewound(*record.rng):
        return record.func(*args, **kwargs)


def _private(tensor: Tensor) -> Tensor:
    """The same view on a copy of the whole storage."""
    return Place.of(tensor).on(storage_of(tensor).clone())


def _changed(record: Record, argument: Pinned) -> CannotReplay:
    return CannotReplay(
        f"memopt cannot compute {record.kind.name} again: its input {argument.size} was changed in place "
        "after forward, outside of what memopt watches. Nothing wrong was computed; profile the script again, "
        "or advise without recompute (--deny recompute)"
    )
