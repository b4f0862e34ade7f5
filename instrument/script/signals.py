"""A last word before SIGTERM ends the process, and signals that wait until something has been done as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def before_terminating(action: Callable[[], None]) -> None:
    """Run `action` when SIGTERM comes, then die of it as python would by default.

    Does nothing where the script has a handler of its own or ignores the signal; one that it
    installs later replaces ours. A forked child dies at once, as it would have.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    pid = os.getpid()

    def die(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() == pid:
            with contextlib.suppress(Exception):
                action()
        os.kill(os.getpid(), number)

    def default_again() -> None:
        if signal.getsignal(signal.SIGTERM) is die:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, die)
    os.register_at_fork(after_in_child=default_again)


_NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "USR1", "USR2", "CONT")
_SENT = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""Those that a person, a timer or a cluster sends."""
_holding = False


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Handlers of signals that are written in Python run when the block has ended, not in the middle of it: what they raise, or
    save, finds everything in its place. A second Ctrl-C does not wait. In another thread than the main one nothing is to be held."""
    global _holding
    if _holding or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and any(number == each for each, _ in waiting):
            handlers[number](number, frame)
        else:
            waiting.append((number, frame))

    handlers: dict[int, Any] = {
        number: handler for number in _SENT if callable(handler := signal.getsignal(number))
    }
    _holding = True
    try:
        for number in handlers:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _holding = False
        for number, frame in waiting:
            handlers[number](number, frame)
