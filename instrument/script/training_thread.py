"""The thread that trains: the one that imported torch, until another one is the first to call backward or to step an optimizer.

Where the script trains in one thread after the other (a thread for each epoch, or fold), the next one takes over when its
predecessor has ended. Threads that train beside it are left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class TrainingThread:
    """One for everything that watches a script; hot paths compare `ident`."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self._thread = threading.current_thread()
        self._trains = False
        self._ends = threading.local()
        self.backward_makes_graph = False
        """It waits for a backward call that makes a graph of its own (`create_graph`). On a GPU autograd's thread runs that, and is meant by `is_here`."""

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self.ident or (
            self.backward_makes_graph and isinstance(threading.current_thread(), threading._DummyThread)
        )

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

    def at_end(self, action: Callable[[], None]) -> None:
        """Run `action` in this thread when it ends, before anybody who joins it goes on.

        What memopt leaves in torch's thread-local state is freed after that, and needs the interpreter, which may be gone by then:
        the process would abort.
        """
        self._ends.action = AtEnd(action)


class AtEnd:
    """Thread-local objects go when their thread does, while it can still run Python."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        self._action()
