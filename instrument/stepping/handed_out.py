"""What `optimizer.state_dict()` has given the script of a state that may be in a tier later: each parameter's dict is the optimizer's own, and the
script may keep it (`checkpoint = {"optimizer": optimizer.state_dict()}`). Whoever reads it finds it whole.

From then on the optimizer has a `HandedOut` there, a dict that tells of whoever looks. It is copied and pickled as a plain dict; `torch.save`, whose
files hold no other, is given plain ones. While another thread may read what was handed out, the state stays.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, ItemsView, ValuesView
from typing import Any

import torch

from memopt.instrument.script.other_threads import threads_of_the_script
from memopt.instrument.torch_internals import tree_node


class HandedOut(dict[str, Any]):
    """The state of one parameter. `looked_at` is called before it is read; without one it is a plain dict. What goes on inside uses `dict`'s own
    methods."""

    looked_at: Callable[[], None] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain dict; by a `save` of torch's that somebody had before it was replaced, as the only other kind that torch loads by default."""
        self._tell()
        by_torch = sys._getframe(1).f_globals.get("__name__") == torch.serialization.__name__
        return OrderedDict if by_torch else dict, (), None, None, iter(list(dict.items(self)))

    def _tell(self) -> None:
        if self.looked_at is not None:
            self.looked_at()

    def copy(self) -> dict[str, Any]:
        self._tell()
        return dict(dict.items(self))

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
        self._tell()
        return iter(list(dict.keys(self)))


def _whole_first(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: HandedOut, *args: Any, **kwargs: Any) -> Any:
        self._tell()
        return plain(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__contains__",
    "__len__",
    "__eq__",
    "__ne__",
    "__ior__",
    "__repr__",
    "__reversed__",
    "keys",
    "get",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "clear",
):
    setattr(HandedOut, _name, _whole_first(_name))
HandedOut.__hash__ = None


def tells_of_looks(state: dict[Any, Any]) -> bool:
    """Was any of `state` handed out, to nobody but this thread? Others are those that run the script's code, or a library's on a dict of the
    script's (`Thread(target=torch.save, args=(checkpoint, path))`)."""
    if not any(type(inner) is HandedOut for inner in dict.values(state)):
        return False
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    return not threads_of_the_script() and not any(map(_has_a_dict, others))


def _has_a_dict(thread: threading.Thread) -> bool:
    given = (*getattr(thread, "_args", ()), *getattr(thread, "_kwargs", {}).values())
    return any(isinstance(each, dict) for each in given)


def watch_what_is_handed_out(optimizer: torch.optim.Optimizer, looked_at: Callable[[], None]) -> None:
    """Have `looked_at` called from here on before anybody reads what `optimizer.state_dict()` gives of its state."""
    _taken_for_plain_ones()

    def hand_out(optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> None:
        state, given = vars(optimizer).get("state"), found.get("state")
        if not isinstance(state, dict) or type(given) is not dict:
            return
        handed: dict[int, HandedOut] = {}
        for parameter in list(dict.keys(state)):
            inner = dict.__getitem__(state, parameter)
            if type(inner) is dict and sys.getrefcount(inner) <= _GIVEN:
                handed[id(inner)] = new = HandedOut(inner)
                new.looked_at = looked_at
                dict.__setitem__(state, parameter, new)
        found["state"] = {key: handed.get(id(each), each) for key, each in given.items()}

    with contextlib.suppress(
        AttributeError
    ):  # one that never called its base's __init__: what it hands out stays on the device
        optimizer.register_state_dict_post_hook(hand_out, prepend=True)


def tell_of_looks(state: dict[Any, Any], looked_at: Callable[[], None]) -> None:
    """What was handed out of `state` tells somebody else from here on."""
    for inner in dict.values(state):
        if type(inner) is HandedOut:
            inner.looked_at = looked_at


def _references_to_what_is_given() -> int:
    state = {0: dict[str, Any]()}
    given = dict(state)
    inner = dict.__getitem__(state, 0)
    found = sys.getrefcount(inner)
    del given
    return found


_GIVEN = _references_to_what_is_given()
"""As many hold what the state, and what is given, hold alone."""


@functools.cache
def _taken_for_plain_ones() -> None:
    """By `torch.save`, whose files are loaded without other classes, and by torch's trees."""
    tree_node(HandedOut, lambda found: ([*found.values()], [*found]), lambda parts, keys: dict(zip(keys, parts, strict=True)))  # fmt: skip
    original: Callable[..., Any] = torch.save

    @functools.wraps(original)
    def save(obj: Any, *arguments: Any, **named: Any) -> Any:
        return original(_plain(obj, {}), *arguments, **named)

    torch.save = save


def _plain(thing: Any, known: dict[int, Any]) -> Any:
    """`thing`, with a plain dict in the place of each that was handed out, in dicts, lists and tuples."""
    kind = type(thing)
    if kind is HandedOut:
        if id(thing) not in known:
            known[id(thing)] = thing.copy()
        return known[id(thing)]
    if kind is dict or kind is OrderedDict:
        changed = {key: new for key, each in thing.items() if (new := _plain(each, known)) is not each}
        return kind((key, changed.get(key, each)) for key, each in thing.items()) if changed else thing
    if kind is list or kind is tuple:
        parts = [_plain(each, known) for each in thing]
        same = all(new is each for new, each in zip(parts, thing, strict=True))
        return thing if same else kind(parts)
    return thing
