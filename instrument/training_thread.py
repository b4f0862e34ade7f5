"""The thread that trains: the one that imported torch, until another one is the first to call backward or to step an optimizer.

Where the script trains in one thread after the other (a thread for each epoch, or fold), the next one takes over when its
predecessor has ended. Threads that train beside it are left alone.
"""

from __future__ import annotations

import threading


class TrainingThread:
    """One for everything that watches a script; hot paths compare `ident`."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self._thread = threading.current_thread()
        self._trains = False

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self.ident

    def taken_here(self) -> bool:
        """Somebody trains here now. True when this thread has become the training thread by that."""
        if self._trains and self._thread.is_alive():
            return False
        self._trains = True
        here = threading.current_thread()
        if here is self._thread:
            return False
        self.ident, self._thread = threading.get_ident(), here
        return True
