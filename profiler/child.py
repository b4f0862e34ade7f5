"""Records a process that the script has started, in that process; the first that trains leaves the profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memopt.instrument.loop import forget_parents
from memopt.instrument.script.children import is_first
from memopt.instrument.script.command import Command
from memopt.profiler.recordings import Wanted
from memopt.profiler.session import ProfileSession
from memopt.trace import Trace


@dataclass(frozen=True, slots=True)
class RecordsChild:
    """A `Watcher`. The process is not stopped: others may wait for it."""

    command: Command
    wanted: Wanted
    path: Path
    claim: Path
    """A file that is there once a process has left its profile."""

    def run(self, target: Callable[[], Any]) -> Any:
        """Call `target`, record it, and write the profile if nobody has."""
        mine: list[bool] = []

        def write(trace: Trace) -> None:
            if not mine:
                mine.append(is_first(self.claim))
            if mine[0]:
                trace.save(self.path)

        forget_parents(ProfileSession)
        session = ProfileSession(self.command, replace(self.wanted, keep_running=True, offload=None), write)
        session.install()
        try:
            return target()
        except BaseException as error:
            session.ended_by(error)
            raise
        finally:
            session.finished()
