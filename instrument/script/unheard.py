"""Warnings that memopt's own looks bring about are not heard, and the script's own go on being told once, not again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def unheard() -> Iterator[None]:
    """No warning is told in here. `warnings.catch_warnings` does that too, and makes Python forget which warnings it has told already:
    each change of filters that is announced does, and those of the script would come again after every look."""
    filters = _filters_now()
    ignores = ("ignore", None, Warning, None, 0)
    filters.insert(0, ignores)
    try:
        yield
    finally:
        at = next((place for place, each in enumerate(filters) if each is ignores), None)
        if at is not None:
            del filters[at]


def _filters_now() -> list[Any]:
    """The filters that hold here: from Python 3.14 on a context may have its own."""
    of_context = getattr(warnings, "_get_filters", None)
    found: Any = warnings.filters if of_context is None else of_context()
    return cast("list[Any]", found)
