"""Optimizer state that is in a tier between steps: what stands for `optimizer.state` meanwhile.

Whoever reads it but the paged step (`state_dict`, a checkpoint, a logger) finds it whole: the first look brings all of it back, and it
stays until the script goes on to train: until it saves a tensor for backward, or, once it has, until the next step has ended. A forked
child could not bring it back: it is whole before the script forks, except for a DataLoader's workers, which do not look.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, ItemsView, ValuesView
from typing import Any

from memopt.errors import MemoptError
from memopt.instrument.script.forks import bring_back_before_forks


class StateElsewhere(defaultdict[Any, Any]):
    """`optimizer.state`, as its owner's `bring_back` makes it whole. What goes on inside uses `dict`'s own methods."""

    bring_back: Callable[[], None]
    looked_at: Callable[[], None]

    def __init__(
        self,
        state: dict[Any, Any],
        bring_back: Callable[[], None],
        looked_at: Callable[[], None] | None = None,
    ) -> None:
        """`looked_at`: in place of `bring_back` where it is the script that looks."""
        super().__init__(dict)
        for key in dict.keys(state):
            dict.__setitem__(self, key, dict.__getitem__(state, key))
        self.bring_back = bring_back
        self.looked_at = looked_at or bring_back
        _living[id(self)] = self

    def __reduce__(self) -> Any:
        """Copied and pickled as what torch makes: a plain `defaultdict`."""
        self.looked_at()
        return defaultdict, (dict,), None, None, iter(list(dict.items(self)))

    def copy(self) -> Any:
        self.looked_at()
        return defaultdict(dict, dict.items(self))

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def items(self) -> Any:
        """Looked at whenever the script goes on with it, also after steps."""
        return ItemsView(self)

    def values(self) -> Any:
        """As `items`."""
        return ValuesView(self)

    def __iter__(self) -> Any:  # `dict(state)` would go past __getitem__ were this not here
        return iter(list(dict.keys(self)))


def _whole_first(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def method(self: StateElsewhere, *args: Any, **kwargs: Any) -> Any:
        self.looked_at()
        return plain(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__eq__",
    "__ne__",
    "__ior__",
    "__repr__",
    "get",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "clear",
):
    setattr(StateElsewhere, _name, _whole_first(_name))
StateElsewhere.__hash__ = None

_living: weakref.WeakValueDictionary[int, StateElsewhere] = weakref.WeakValueDictionary()
"""By id, since none can be hashed."""

bring_back_before_forks(_living.values, lambda state: state.looked_at(), MemoptError)
