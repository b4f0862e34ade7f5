"""All objects of some kinds that live in this process, as far as the garbage collector knows of them."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress, count
from typing import Any

from memopt.instrument.script.unheard import unheard

_LISTS = (list, deque)


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
    found: tuple[list[Any], ...] = tuple([] for _ in kinds)
    with unheard():
        things = gc.get_objects()
        types = list(map(type, things))
        keys = types if all(map(_hashes_by_identity, set(map(type, types)))) else list(map(id, types))
        kind_of = dict(zip(keys, types, strict=True))
        into = {
            key: each for key, kind in kind_of.items() if (each := _place(kind, kinds, found)) is not None
        }
        for at in compress(count(), map(into.__contains__, keys)):
            into[keys[at]].append(things[at])
    return found


def held_by_lists(ids: set[int], *, apart: list[Any]) -> set[int]:
    """Those of `ids` whose objects a list holds, `apart` from that one. Lists of a subclass may run the script's code, and are not looked
    into. (To ask `gc.get_referrers` took seconds: it compares all that the process refers to with each of a few hundred objects.)"""
    found: set[int] = set()
    if ids:
        with unheard():
            lists = [each for each in gc.get_objects() if type(each) in _LISTS and each is not apart]
        for each in lists:
            found |= ids.intersection(map(id, each))
    return found


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
