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
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from memopt.instrument.script.other_threads import threads_of_the_script
from memopt.instrument.stepping.whole_first import WholeFirst, whole_first
from memopt.instrument.torch_internals import tree_node


@whole_first("__contains__", "__iter__", "__len__", "__reversed__", "keys")
class HandedOut(WholeFirst, dict[str, Any]):
    """The state of one parameter. Where nobody is told it is a plain dict."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain dict; by a `save` of torch's that somebody had before it was replaced, as the only other kind that torch loads by default."""
        self.looked_at()
        by_torch = sys._getframe(1).f_globals.get("__name__") == torch.serialization.__name__
        return OrderedDict if by_torch else dict, (), None, None, iter(list(dict.items(self)))

    def copy(self) -> dict[str, Any]:
        return dict(dict.items(self))


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


def watch_what_is_handed_out(optimizer: torch.optim.Optimizer) -> None:
    """Have whatever stands for its state told from here on before anybody reads what `optimizer.state_dict()` gives of that."""
    _taken_for_plain_ones()
    if optimizer not in _watched:
        _watched.add(optimizer)
        with contextlib.suppress(
            AttributeError
        ):  # its base's __init__ was never called: what it hands out stays
            optimizer.register_state_dict_post_hook(_hand_out, prepend=True)


def _hand_out(optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> None:
    state, given = vars(optimizer).get("state"), found.get("state")
    if not isinstance(state, dict) or type(given) is not dict:
        return
    handed: dict[int, HandedOut] = {}
    for parameter in list(dict.keys(state)):
        inner = dict.__getitem__(state, parameter)
        if type(inner) is dict and sys.getrefcount(inner) <= _GIVEN:
            handed[id(inner)] = new = HandedOut(inner)
            dict.__setitem__(state, parameter, new)
    tell_of_looks(state)
    found["state"] = {key: handed.get(id(each), each) for key, each in given.items()}


def tell_of_looks(state: dict[Any, Any]) -> None:
    """Whoever is told of looks at `state` is told of those at what was handed out of it."""
    if isinstance(state, WholeFirst):
        for inner in dict.values(state):
            if type(inner) is HandedOut:
                inner.looked_at = state.looked_at


def _references_to_what_is_given() -> int:
    state = {0: dict[str, Any]()}
    given = dict(state)
    inner = dict.__getitem__(state, 0)
    found = sys.getrefcount(inner)
    del given
    return found


_GIVEN = _references_to_what_is_given()
"""As many hold what the state, and what is given, hold alone."""
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


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
