"""Processes that the script starts itself to train in (Hogwild, `torch.multiprocessing.spawn`): they are watched as the script is.

Their target is wrapped when they are started; fork and spawn both bring the wrapper along. Workers of data loaders and pools are let
be. A process of a class with a `run` of its own is not followed.
"""

from __future__ import annotations

import os
import resource
import secrets
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from memopt.instrument.script.on_import import QUIET, quiet_allocator
from memopt.instrument.script.runner import without_ours

_NOT_THESE = ("torch.utils.data", "multiprocessing.", "concurrent.")


def not_followed() -> str:
    """The reason, where processes that are not followed took most of the processor's time; `""` where they took little."""
    here, there = (
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    if there < max(1.0, here / 2):
        return ""
    return (
        f"processes that it started took {there:.0f} s of processor time: those of a pool, or of a program that a script starts, are not "
        "followed (those of mp.Process and mp.spawn are)"
    )


PUT_BEFORE = "the command that the script itself starts, with memopt before it; for a pool, a script that trains without one"
"""What to try then."""


class Watcher(Protocol):
    """What watches a child; it is pickled where the child is spawned."""

    def run(self, target: Callable[[], Any]) -> Any:
        """Call `target` in the child, and watch it."""


class Followed:
    """The target of a process, watched."""

    def __init__(self, target: Callable[..., Any], watcher: Watcher) -> None:
        self._target = target
        self._watcher = watcher
        self._quiet = QUIET not in os.environ
        """A process that is spawned imports torch before it knows of memopt."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._quiet:
            os.environ.pop(QUIET, None)
        try:
            return self._watcher.run(lambda: self._target(*args, **kwargs))
        except BaseException as error:
            error.__traceback__ = without_ours(error.__traceback__)
            raise


class Children:
    """Between `install` and `remove`, processes that are started are followed, for as long as `wanted()`."""

    def __init__(self, watcher: Watcher, wanted: Callable[[], bool]) -> None:
        self._watcher = watcher
        self._wanted = wanted
        self._start: Callable[..., Any] = BaseProcess.start

    def install(self) -> None:
        original, pid = self._start, os.getpid()

        def start(process: BaseProcess) -> None:
            target = getattr(process, "_target", None)
            if target is not None and os.getpid() == pid and self._wanted() and _may_train(target):
                process._target = Followed(target, self._watcher)  # type: ignore[attr-defined]
                with quiet_allocator():
                    original(process)
            else:
                original(process)

        BaseProcess.start = start  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        BaseProcess.start = self._start  # type: ignore[method-assign]


def _may_train(target: Callable[..., Any]) -> bool:
    return not str(getattr(target, "__module__", "")).startswith(_NOT_THESE)


def unused_name() -> Path:
    """A file for temporary use that only this process, and those that it tells, know of."""
    return Path(tempfile.gettempdir(), f"memopt-{os.getpid()}-{secrets.token_hex(8)}")


def is_first(claim: Path) -> bool:
    """Is this process the first of all that ask for `claim`?"""
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except OSError:
        return False
    return True
