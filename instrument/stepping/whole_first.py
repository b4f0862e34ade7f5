"""Dicts that tell of whoever is about to read them, so that he finds them whole. What goes on inside uses `dict`'s own methods."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound=type)
_READS = (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__eq__",
    "__ne__",
    "__ior__",
    "__repr__",
    "copy",
    "get",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "clear",
)
"""Of a dict's methods those that read values, or write them."""


class WholeFirst:
    """Comes before `dict` among the bases of such a class; `whole_first` does the rest."""

    looked_at: Callable[[], None] = staticmethod(lambda: None)
    """Called before it is read."""

    def copy(self) -> Any:
        """What torch would have made of it."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self.copy()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def items(self: Any) -> Any:
        """Looked at whenever the script goes on with it, also after steps."""
        return ItemsView(self)

    def values(self: Any) -> Any:
        """As `items`."""
        return ValuesView(self)

    def __iter__(self: Any) -> Any:  # `dict(state)` would go past __getitem__ were this not here
        return iter(list(dict.keys(self)))


def whole_first(*more: str) -> Callable[[_Kind], _Kind]:
    """Has a class tell of its reads before they happen; `more` of its methods are such, too."""

    def tells(kind: _Kind) -> _Kind:
        for name in (*_READS, *more):
            setattr(kind, name, _telling(getattr(kind, name)))
        kind.__hash__ = None  # type: ignore[assignment]
        return kind

    return tells


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: WholeFirst, *args: Any, **kwargs: Any) -> Any:
        self.looked_at()
        return plain(self, *args, **kwargs)

    method.__name__ = plain.__name__
    return method
