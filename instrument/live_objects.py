"""All objects of some kinds that live in this process, as far as the garbage collector knows of them.

To look at all that it knows of takes 50 to 100 ms and more, as long as many a step. What is found at the first look, and before the collector
counts something among its old objects, is remembered by weak references: later looks are at those, and at what is young.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress, count
from typing import Any

from memopt.instrument.script.unheard import unheard

_LISTS = (list, deque)
_FEW = 8
"""Things of which the collector is asked who refers to them."""
_HAS_GENERATIONS = sys.version_info < (3, 14) and getattr(sys, "_is_gil_enabled", lambda: True)()
_MOST_UNASKED = 64
"""Collections of what is young, after which nobody looks any more: to remember takes a part of what they do."""


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is collected in here, where nothing of the script's runs and much is made that is none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def living(*kinds: type) -> tuple[list[Any], ...]:
    """For each kind its objects, those of subclasses too; each under the first that it is of. A script has a million objects
    and a few thousand types, so a type is asked once. Objects are not: a proxy may run the script's code when asked for its class."""
    with unheard(), no_collections():
        return _of_kinds(_old.and_young(kinds), kinds)


def forget_old_objects() -> None:
    """The next look is at all there is."""
    _old.forget()


def let_tensors_be_swapped() -> None:
    """`torch.utils.swap_tensors` refuses tensors that anybody has weak references to: from here on memopt has none then."""
    import torch

    original: Callable[..., Any] = torch.utils.swap_tensors
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def swap_tensors(*arguments: Any, **named: Any) -> Any:
        forget_old_objects()
        return original(*arguments, **named)

    torch.utils.swap_tensors = swap_tensors


class _Old:
    """What is remembered of the objects that the collector counts among the old ones."""

    def __init__(self) -> None:
        self._kinds: tuple[type, ...] = ()
        self._found: list[weakref.ref[Any]] = []
        self._unasked = 0
        self._listener = self._collects

    def and_young(self, kinds: tuple[type, ...]) -> list[Any]:
        """Old objects, of `kinds` at least, and all young ones. No garbage may be collected meanwhile."""
        self._unasked = 0
        if not (self._kinds and set(kinds) <= set(self._kinds) and self._listens):
            return self._begin(kinds)
        known = len(self._found)
        alive = [(each, thing) for each in self._found[:known] if (thing := each()) is not None]
        if len(alive) < known // 2:
            self._found[:known] = [each for each, _ in alive]
        young = _young()
        return [thing for _, thing in alive] + young

    def _begin(self, kinds: tuple[type, ...]) -> list[Any]:
        """As `and_young`; the old ones are remembered from here on, and those of the kinds that others ask for."""
        import torch

        others = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.UntypedStorage, *self._kinds)
        self.forget()
        if not _HAS_GENERATIONS:
            return gc.get_objects()
        if not self._listens:
            gc.callbacks.append(self._listener)
        self._kinds = tuple(dict.fromkeys((*kinds, *others)))
        young = _young()
        return self._remember(gc.get_objects(generation=2)) + young

    @property
    def _listens(self) -> bool:
        """Is it told of collections still? The list of those that are is the script's, too."""
        return any(each is self._listener for each in gc.callbacks)

    def forget(self) -> None:
        self._kinds, self._found = (), []

    def _collects(self, phase: str, about: dict[str, int]) -> None:
        """The collector begins, or has ended: what is young and survives will be old, unless it looks at the youngest alone."""
        if not self._kinds or phase != "start" or about["generation"] == 0:
            return
        self._unasked += 1
        if self._unasked > _MOST_UNASKED:
            self.forget()
        else:
            self._remember(_young())

    def _remember(self, things: list[Any]) -> list[Any]:
        """Those among `things` that are of the kinds."""
        found = [each for of_kind in _of_kinds(things, self._kinds) for each in of_kind]
        try:
            self._found += map(weakref.ref, found)
        except Exception:  # a class of the script's, of which no weak reference can be made
            self.forget()
        return found


def _young() -> list[Any]:
    """What is young. A list that is not made when this is called: it would be among that, and hold itself."""
    youngest = gc.get_objects(generation=0)
    return youngest + gc.get_objects(generation=1)


def _of_kinds(things: list[Any], kinds: tuple[type, ...]) -> tuple[list[Any], ...]:
    """As `living`, of those among `things`."""
    found: tuple[list[Any], ...] = tuple([] for _ in kinds)
    types = list(map(type, things))
    keys = types if all(map(_hashes_by_identity, set(map(type, types)))) else list(map(id, types))
    kind_of = dict(zip(keys, types, strict=True))
    into = {key: each for key, kind in kind_of.items() if (each := _place(kind, kinds, found)) is not None}
    for at in compress(count(), map(into.__contains__, keys)):
        into[keys[at]].append(things[at])
    return found


def held_by_lists(things: list[Any], *, apart: list[Any]) -> set[int]:
    """ids of those of `things` that a list holds, `apart` from that one, and from `things`. Lists of a subclass may run the script's code, and
    are not looked into. (`gc.get_referrers` takes 25 ms where there are few, and seconds where there are hundreds: it compares all that the
    process refers to with each.)"""
    found: set[int] = set()
    if things:
        ids = set(map(id, things))
        with unheard():
            holders = gc.get_referrers(*things) if len(things) <= _FEW else gc.get_objects()
            lists = [each for each in holders if type(each) in _LISTS]
        for each in lists:
            if each is not apart and each is not things:
                found |= ids.intersection(map(id, each))
    return found


_old = _Old()


def _hashes_by_identity(metaclass: type) -> bool:
    """Can a class of it be looked up without code of the script's? That is faster than by its `id`."""
    return all(getattr(metaclass, each) is getattr(type, each) for each in ("__hash__", "__eq__"))


def _place(kind: type, kinds: tuple[type, ...], found: tuple[list[Any], ...]) -> list[Any] | None:
    """Where objects of `kind` belong."""
    return next((into for other, into in zip(kinds, found, strict=True) if _is(kind, other)), None)


def _is(kind: type, other: type) -> bool:
    try:
        return issubclass(kind, other)
    except TypeError:
        return False
