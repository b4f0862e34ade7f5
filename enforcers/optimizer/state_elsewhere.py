"""Optimizer state that is in a tier between steps: what stands for `optimizer.state` meanwhile.

Whoever reads it but the paged step (`state_dict`, a checkpoint, a logger) finds it whole: the first look brings all of it back, and it
stays until the script goes on to train: until it saves a tensor for backward, or, once it has, until the next step has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class StateElsewhere(defaultdict[Any, Any]):
    """`optimizer.state`, as its owner's `bring_back` makes it whole. What goes on inside uses `dict`'s own methods."""

    bring_back: Callable[[], None]

    def __init__(self, state: dict[Any, Any], bring_back: Callable[[], None]) -> None:
        super().__init__(dict)
        for key in dict.keys(state):
            dict.__setitem__(self, key, dict.__getitem__(state, key))
        self.bring_back = bring_back

    def __reduce__(self) -> Any:
        """Copied and pickled as what torch makes: a plain `defaultdict`."""
        self.bring_back()
        return defaultdict, (dict,), None, None, iter(list(dict.items(self)))

    def __iter__(self) -> Any:  # `dict(state)` would go past __getitem__ were this not here
        return iter(list(dict.keys(self)))


def _whole_first(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def method(self: StateElsewhere, *args: Any, **kwargs: Any) -> Any:
        self.bring_back()
        return plain(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__eq__",
    "__or__",
    "__ior__",
    "__ror__",
    "__copy__",
    "__repr__",
    "get",
    "items",
    "values",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "copy",
    "clear",
):
    setattr(StateElsewhere, _name, _whole_first(_name))
StateElsewhere.__hash__ = None
