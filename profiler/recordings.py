"""One recording: the iteration under way, what it gave, and what can be said of it."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memopt.instrument.runner import Command, find_source
from memopt.trace import Script

if TYPE_CHECKING:
    from memopt.profiler.clock import OpClock, Usage
    from memopt.profiler.recorder import Recorder


@dataclass(slots=True)
class Recording:
    """One iteration being recorded."""

    recorder: Recorder
    clock: OpClock
    iteration: int


@dataclass(slots=True)
class Result:
    """What recording an iteration gave."""

    recorder: Recorder
    usage: Usage | None
    iteration: int
    snapshot: bool = False
    """Of one moment: storages without ops."""
    more_times_us: list[list[float]] = field(default_factory=list)


def describe_script(command: Command) -> Script:
    """The command as a plan keeps it, but for torch's version, which is known when the script has imported it."""
    return Script(
        argv=list(command.argv),
        cwd=os.getcwd(),
        as_module=command.as_module,
        sha256=hashlib.sha256(find_source(command).read_bytes()).hexdigest(),
        python=platform.python_version(),
        torch="",
    )


def tells_of_training(result: Result, *, ended_early: bool) -> bool:
    """Is there a training step in what was recorded, or, where an exception ended it, the beginning of one?"""
    recorder = result.recorder
    return recorder.backward_calls > 0 or (ended_early and bool(recorder.slots or result.iteration > 1))


def same_ops(a: Recorder, b: Recorder) -> bool:
    return [row.kind.name for row in a.ops] == [row.kind.name for row in b.ops]


def leave(mode: Recorder) -> None:
    """Exit the mode if it is the innermost; one that the script entered since then stays, ours records nothing any more."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    if _get_current_dispatch_mode() is mode:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
