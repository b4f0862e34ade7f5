"""A last word before SIGTERM ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def before_terminating(action: Callable[[], None]) -> bool:
    """Run `action` when SIGTERM comes, then die of it as python would by default.

    Does nothing, and returns False, where the script has a handler of its own or ignores the signal; one that it
    installs later replaces ours. A forked child dies at once, as it would have.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
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
    return True
