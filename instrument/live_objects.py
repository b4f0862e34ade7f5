"""All objects of some kinds that live in this process, as far as the garbage collector knows of them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
    where: dict[int, list[Any] | None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            kind = type(thing)
            if id(kind) not in where:
                where[id(kind)] = next((into for each, into in zip(kinds, found, strict=True) if _is(kind, each)), None)  # fmt: skip
            into = where[id(kind)]
            if into is not None:
                into.append(thing)
    return found


def _is(kind: type, other: type) -> bool:
    try:
        return issubclass(kind, other)
    except TypeError:
        return False
