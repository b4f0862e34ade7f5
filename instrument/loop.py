"""What watches the training loop of a script: a session's own, or one that several sessions share one after the other, so that names stay and
boundaries are known."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memopt.instrument.script.on_import import call_after_import, quiet_allocator

if TYPE_CHECKING:
    from memopt.instrument.as_plain import PlainForms
    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations, Listener


@dataclass(frozen=True, slots=True)
class Loop:
    """Installed by its owner, who may hand it to one session at a time and tell that session of the loop."""

    frames: Frames
    iterations: Iterations
    forms: PlainForms

    @staticmethod
    def start(listener: Listener, *, optimizers: int = 0, calls: bool = True, forms: bool = True) -> Loop:
        """Watch from here on, once torch is imported; `calls`: of modules too; `forms`: and have formulas run as they do unwatched.

        `optimizers`: how many step in an iteration, where that is known. Raises `NotPossibleHere` with a torch that cannot be watched.
        """
        from memopt.instrument.as_plain import PlainForms
        from memopt.instrument.frames import Frames
        from memopt.instrument.iterations import Iterations
        from memopt.instrument.live_objects import let_tensors_be_swapped
        from memopt.instrument.script.script_profiler import watch
        from memopt.instrument.torch_internals import WATCH, require

        require(WATCH)
        watch()
        let_tensors_be_swapped()
        frames = Frames()
        loop = Loop(frames, Iterations(listener, frames.thread, optimizers=optimizers), PlainForms())
        loop.iterations.install()
        if calls:
            frames.install()
        if forms:
            loop.forms.install()
        return loop

    def remove(self) -> None:
        """Watch no more."""
        from memopt.instrument.live_objects import forget_old_objects

        forget_old_objects()
        for part in (self.iterations, self.frames, self.forms):
            part.remove()


class Session(Protocol):
    """What waits for torch, and must leave a forked child alone."""

    def torch_imported(self) -> None: ...
    def leave_child(self) -> None:
        """Called in a process that was forked from the session's: what steers or watches the parent does nothing here."""


_installed: dict[type, tuple[int, Session]] = {}
"""By its type the session of this process, or, after a fork, of its parent; and the process that installed it."""


def begin_at_torch(session: Session) -> None:
    """Tell `session` when the script imports torch."""
    _installed[type(session)] = os.getpid(), session
    begin: Callable[[], None] = session.torch_imported
    call_after_import("torch", begin, within=quiet_allocator)


def forget_parents(kind: type[Session]) -> None:
    """In a process that was forked: the parent's session of this `kind` lets go."""
    pid, session = _installed.pop(kind, (os.getpid(), None))
    if session is not None and pid != os.getpid():
        session.leave_child()
