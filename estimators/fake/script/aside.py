"""What a script does beside its main line: in threads that it starts after its training loop, and in `atexit` handlers.

Ops are recorded in order, so one thread runs at a time: who starts a thread waits until it is done. One that waits for its starter
ends the run there. Threads that begin earlier (they prefetch batches, as a rule) run beside the script and are not recorded; where one
calls a module, `Watch` tells its line.
"""

from __future__ import annotations

import atexit
import functools
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from memopt.estimators.fake.ledger import Enough
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.values.lines import is_users

# what is patched
_ATEXIT: Any = atexit
_THREAD: Any = threading.Thread

_SECONDS = 2.0
"""A thread that runs no op for so long waits for something."""


_AFTER_FAILURE_S = 5.0
"""A script that runs no op for so long after a thread of its own has failed waits for that."""


class Aside:
    """The script's own handlers, once installed, and its threads."""

    def __init__(self, recorder: FakeRecorder) -> None:
        self.recorder = recorder
        self._handlers: list[functools.partial[Any]] = []
        self.failure: Exception | None = None
        """Of a thread that the script then waited for."""
        self._over = False
        self._register, self._unregister = _ATEXIT.register, _ATEXIT.unregister

    def install(self) -> None:
        """Patch Python in this process, for good."""
        _ATEXIT.register, _ATEXIT.unregister = self._registered, self._unregistered
        start = _THREAD.start

        def started(thread: threading.Thread) -> None:
            if not _is_users_thread(thread):
                start(thread)
            elif self.recorder.op_limit:
                self._follow(thread, start)
            else:
                self._let_run(thread, start)

        _THREAD.start = started

    def end(self) -> None:
        """The script is over: nobody waits for its threads any more."""
        self._over = True

    def at_exit(self) -> None:
        """Run the script's handlers, the last one first, as Python does when it has ended."""
        while self._handlers:
            self._handlers.pop()()

    def _registered(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_users(function):
            return self._register(function, *args, **kwargs)
        self._handlers.append(functools.partial(function, *args, **kwargs))
        return function

    def _unregistered(self, function: Any) -> None:
        self._handlers = [each for each in self._handlers if each.func != function]
        self._unregister(function)

    def _follow(self, thread: threading.Thread, start: Callable[[threading.Thread], None]) -> None:
        """Start `thread`, recorded, and wait for it."""
        assert self.recorder.watch is not None
        run, ended = thread.run, list[Enough]()

        def recorded() -> None:
            try:
                with self.recorder.in_this_thread():
                    run()
            except Enough as enough:
                ended.append(enough)

        thread.run = recorded  # type: ignore[method-assign]
        with self.recorder.watch.elsewhere():
            start(thread)
            seen = -1
            while thread.is_alive() and self.recorder.op_count > seen:
                seen = self.recorder.op_count
                thread.join(_SECONDS)
        if ended or thread.is_alive():
            raise Enough

    def _let_run(self, thread: threading.Thread, start: Callable[[threading.Thread], None]) -> None:
        """Start `thread`, not recorded."""
        run = thread.run

        def told() -> None:
            try:
                run()
            except Exception as error:
                start(threading.Thread(target=self._end_if_all_waits, args=(error,), daemon=True))
                raise

        thread.run = told  # type: ignore[method-assign]
        start(thread)

    def _end_if_all_waits(self, error: Exception) -> None:
        """The script may wait for ever for what a thread that has failed was to give (batches)."""
        seen = -1
        while self.recorder.op_count > seen:
            seen = self.recorder.op_count
            time.sleep(_AFTER_FAILURE_S)
        if self._over:
            return
        self.failure = error
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _is_users_thread(thread: Any) -> bool:
    """Whether what a thread runs is the script's own, not a library's."""
    return _is_users(type(thread).run) or _is_users(getattr(thread, "_target", None))


def _is_users(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and is_users(code.co_filename)
