"""Every allocation and free of the CPU allocator, through `torch.profiler`, which tells of them where nothing else does.

Of ops the profile says nothing (`record_functions`): to note each call inside each op takes longer than many an op.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memopt.instrument.script.script_profiler import is_free, on_script, ours, ours_ends, watch
from memopt.instrument.script.training_thread import AtEnd
from memopt.instrument.torch_internals import RecordFunction, record_functions

MARK = "memopt::op"
"""`record_function`s of this name divide the events into ops."""
_FREED = "memopt::freed "
_ALLOCATION = "[memory]"

_here = threading.local()
"""`running`: what was started last in this thread; `end` stops it with the thread."""


@dataclass(slots=True, eq=False)
class Started:
    """A profile that runs, and the thread that it watches, which alone can stop it.

    One that nobody stops dies with torch's thread-local state: torch complains on stderr, or the process dies as it exits.
    """

    profile: Any
    thread: int
    left: bool = False
    """Whoever started it has no use for it any more, but was in another thread."""
    stopped: bool = False

    def stop(self) -> Any:
        """Its results, 2 KB for each allocation or free, which go with whoever asks: the profile itself is in a reference cycle."""
        self.stopped = True
        record_functions(True)
        ours_ends()
        with quiet_profiler(), ours():
            self.profile.stop()
        inner, self.profile.profiler = self.profile.profiler, None
        return inner.kineto_results


def _running() -> Started | None:
    """What runs in this thread."""
    running: Started | None = getattr(_here, "running", None)
    return running if running is not None and not running.stopped else None


def _stop(running: Started | None) -> None:
    if running is not None and not running.stopped:
        with contextlib.suppress(Exception):
            running.stop()


def _stop_here() -> None:
    _stop(_running())


def started_profile() -> Started | None:
    """A running `torch.profiler` profile of the CPU allocator's events; None where the script runs one of its own."""
    watch()
    before = _running()
    if before is not None and before.left:
        _stop(before)
    if not is_free():
        return None
    # Some releases warn, once, of profiles that do not accumulate; one that does makes all its events anew when it stops.
    cpu = torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=True)
    try:
        with quiet_profiler(), ours():
            profile.start()
        if profile.profiler is not None:
            profile.profiler.acc_events = False
    except RuntimeError:
        return None
    record_functions(False)
    started = _here.running = Started(profile, threading.get_ident())
    _here.end = AtEnd(partial(_stop, started))
    atexit.unregister(_stop_here)
    atexit.register(_stop_here)  # of the main thread nothing goes before torch's state does
    return started


def stop_profile(started: Started) -> list[tuple[int, int, int]] | None:
    """Stop what `started_profile` gave; what it saw, as `memory_events`. None in another thread, which cannot stop it."""
    on_script(None)
    if started.thread != threading.get_ident():
        started.left = True
        return None
    if started.stopped:
        return None
    return memory_events(started.stop().experimental_event_tree())


def marked(name: str) -> RecordFunction:
    """A scope of this name in the profile of this thread, open until its `__exit__` is called."""
    scope = RecordFunction(name)
    record_functions(True)
    scope.__enter__()
    record_functions(False)
    return scope


def note_freed(size_bytes: int) -> bool:
    """Write into memopt's profile of this thread that a block which is older has ended now; False where none runs here."""
    if _running() is None:
        return False
    marked(f"{_FREED}{size_bytes}").__exit__(None, None, None)
    return True


def memory_events(tree: Iterable[Any]) -> list[tuple[int, int, int]]:
    """(time ns, kind, bytes) in order; kind 0 = an op ended, 1 = allocated or freed, 2 = an op started.

    The end of a block that was not allocated in this profile is no event: its size would be that of whatever lay there in an
    earlier profile, for the allocator forgets sizes only while a profile runs (ProfiledCPUMemoryReporter).
    """
    found: list[tuple[int, int, int]] = []
    blocks: list[tuple[int, int, int]] = []
    waiting = [*tree]
    while waiting:
        event = waiting.pop()
        name = event.name
        if name == _ALLOCATION:
            block = event.extra_fields
            if block.device.type == "cpu":
                blocks.append((event.start_time_ns, block.alloc_size, block.ptr))
            continue
        waiting += event.children
        if name == MARK:
            found.append((event.start_time_ns, 2, 0))
            found.append((event.end_time_ns, 0, 0))
        elif name.startswith(_FREED):
            found.append((event.start_time_ns, 1, -int(name.removeprefix(_FREED))))
    known: set[int] = set()
    for time_ns, size, address in sorted(blocks):
        if size > 0:
            known.add(address)
        elif address not in known:
            continue
        else:
            known.remove(address)
        found.append((time_ns, 1, size))
    found.sort()
    return found


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep what the profiler's C++ says about itself off the script's stderr."""
    with contextlib.suppress(Exception):  # it may be closed, none, or the script's own without such a method
        sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
