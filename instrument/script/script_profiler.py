"""The script's own torch.profiler goes before ours: torch runs one at a time, and a second one raises in whoever starts it.

A scope that was opened in one profile (`record_function`: every optimizer's step is one) and closes in the next writes its end time into the
first one's memory, which has been freed: what lies there by then is damaged, and the process may die. memopt ends a profile and starts the
next inside the step, so that such a scope is never closed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch  # noqa: F401 - torch.jit resolves names of a scope's methods here
import torch.autograd.profiler as torch_profiler

from memopt.instrument.torch_internals import record_functions

_ours = False
"""memopt itself is starting or stopping a profiler now."""
_busy = False
"""The script has prepared or started one and has not stopped it yet."""
_give_way: Callable[[], None] | None = None
"""Stops memopt's, while it has one running."""
_ended = 0
"""Profiles of memopt's that have ended."""
_never_closed: list[Any] = []
"""Records of scopes that were open then: torch would close them when they are freed."""


def watch() -> None:
    """See from here on when the script profiles itself. May be called again."""
    if getattr(vars(torch_profiler)["_prepare_profiler"], "memopt", False):
        return
    for name, action in (
        ("_prepare_profiler", _script_begins),
        ("_enable_profiler", _script_begins),
        ("_disable_profiler", _script_ends),
    ):
        setattr(torch_profiler, name, _first(action, getattr(torch_profiler, name)))
    _watch_scopes(torch_profiler.record_function)


def _watch_scopes(scope: Any) -> None:
    opened, closed = scope.__enter__, scope.__exit__

    @functools.wraps(opened)
    def enter(self: Any) -> Any:
        found = opened(self)
        self.memopt_ended = _ended
        return found

    @functools.wraps(closed)
    def leave(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        if getattr(self, "memopt_ended", _ended) == _ended:
            return closed(self, exc_type, exc_value, traceback)
        _never_closed.append(self.record)
        return None

    scope.__enter__, scope.__exit__ = enter, leave


def ours_ends() -> None:
    """A profile of memopt's is about to end: what is open now belongs to it."""
    global _ended
    _ended += 1


def _first(action: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def both(*args: Any, **kwargs: Any) -> Any:
        if not _ours:
            action()
        return original(*args, **kwargs)

    both.memopt = True  # type: ignore[attr-defined]
    return both


def _script_begins() -> None:
    global _busy
    _busy = True
    if _give_way is not None:
        _give_way()
    record_functions(True)


def _script_ends() -> None:
    global _busy
    _busy = False


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """What starts or stops a profiler in here is memopt."""
    global _ours
    _ours = True
    try:
        yield
    finally:
        _ours = False


def is_free() -> bool:
    """May memopt start a profiler now?"""
    return not _busy


def on_script(action: Callable[[], None] | None) -> None:
    """Call `action` when the script wants to profile, from now until this is called with None."""
    global _give_way
    _give_way = action
