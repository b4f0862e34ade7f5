"""What `memopt run` keeps between runs: profile and plan of a command, in `.memopt/` beside where it was started. Safe to delete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.errors import MemoptError
from memopt.files import write_atomic
from memopt.plan import Plan, load_plan
from memopt.profiler.trace_of import describe_script
from memopt.version import VERSION

if TYPE_CHECKING:
    from memopt.instrument.script.command import Command
    from memopt.trace import Script

FOLDER = ".memopt"
_MOST_GROWTH = 8.0
"""No plan allows for iterations that save more, as against the recorded one."""
_LATEST = 16
"""Nobody waits for a later iteration to record it: until then the guard holds the budget."""
_ABOUT = 0.999
"""Growth is written rounded."""
_HELPS = 0.7
"""Of what the budget was passed by before, at most: planning for more has helped."""
_README = "# What `memopt run` found out about the runs that were started here. Safe to delete.\n*\n"


class Cache:
    """One command's part of it. Where nothing can be written, a folder that goes with the process takes its place."""

    def __init__(self, command: Command, conditions: dict[str, object], *, keep: bool = True) -> None:
        """`conditions`: all else that a plan depends on (budget, device, kinds of action)."""
        self.script = describe_script(command)
        """As it was when the run began: it may go to another folder before anything is recorded."""
        self._stem = f"{command.stem or 'script'}-{_key(self.script, conditions)}"
        self._passing: tempfile.TemporaryDirectory[str] | None = None
        folder = _folder() if keep else None
        if folder is None:
            self._passing = tempfile.TemporaryDirectory(prefix="memopt-run-", ignore_cleanup_errors=True)
            folder = Path(self._passing.name)
        self.folder = folder

    def trace_path(self, phase: int = 0) -> Path:
        """Where the profile of that phase of the training lies; the first one has the number 0."""
        return self.folder / f"{self._stem}{_suffix(phase)}.profile.json.gz"

    def plan_path(self, phase: int = 0) -> Path:
        """The same of its plan."""
        return self.folder / f"{self._stem}{_suffix(phase)}.plan.json"

    def plan(self, phase: int = 0) -> Plan | None:
        """The plan of the run before; none where there is no whole one."""
        path = self.plan_path(phase)
        if not path.exists():
            return None
        try:
            return load_plan(path)
        except MemoptError:
            return None

    @property
    def _growth_path(self) -> Path:
        return self.folder / f"{self._stem}.growth"

    def growth(self) -> float:
        """How many times as much as the recorded iteration one of the runs before came to, where that passed the budget; 1.0 elsewhere."""
        return self._growth()[0]

    @property
    def grows_in_vain(self) -> bool:
        """Has a plan for more not lowered the peak? Then this is what the runs that follow plan for."""
        factor, planned_for = self._growth()
        return factor == planned_for and self._growth_path.exists()

    def _growth(self) -> tuple[float, float]:
        """For the next run, and what the run that told so had planned for; both are 1.0 where none has."""
        try:
            first, *others = map(float, self._growth_path.read_text(encoding="utf-8").split())
        except (OSError, ValueError):
            return 1.0, 1.0
        return min(max(1.0, first), _MOST_GROWTH), next(iter(others), 1.0)

    def keep_growth(self, factor: float, planned_for: float) -> None:
        """For the next run's plan; this run's was for `planned_for`. Where that was what the run before had asked for, and the peak passed the
        budget by about as much all the same, the next one plans for what that run did, as do all that follow."""
        if self.grows_in_vain:
            return
        last, before = self._growth()
        above, above_before = factor / planned_for - 1, last / before - 1
        in_vain = last > 1 and planned_for >= _ABOUT * last and above > _HELPS * above_before
        wanted = (before, before) if in_vain else (max(factor, last), planned_for)
        with contextlib.suppress(OSError, MemoptError):
            write_atomic(self._growth_path, "{:.3f} {:.3f}\n".format(*wanted).encode())

    @property
    def _largest_path(self) -> Path:
        return self.folder / f"{self._stem}.largest"

    def largest_at(self) -> int:
        """The iteration that is to be recorded, since it was the largest of a run before; 0 where none has told."""
        try:
            return min(int(self._largest_path.read_text(encoding="utf-8")), _LATEST)
        except (OSError, ValueError):
            return 0

    def record_at(self, iteration: int) -> bool:
        """From the next run on record that one. False where it would come late, or where a run before has told which."""
        if not 0 < iteration <= _LATEST or self.largest_at():
            return False
        with contextlib.suppress(OSError, MemoptError):
            write_atomic(self._largest_path, f"{iteration}\n".encode())
        return bool(self.largest_at())

    @property
    def _denied_path(self) -> Path:
        return self.folder / f"{self._stem}.denied"

    def denied(self) -> tuple[str, ...]:
        """Kinds of action that have ended a run before."""
        try:
            return tuple(self._denied_path.read_text(encoding="utf-8").split())
        except OSError:
            return ()

    def deny(self, kind: str) -> None:
        """From the next run on."""
        with contextlib.suppress(OSError, MemoptError):
            write_atomic(self._denied_path, f"{kind}\n".encode())

    def forget(self, *phases: int) -> None:
        """Their plans did not do what they said: the next run records again."""
        for phase in phases:
            with contextlib.suppress(OSError):
                self.plan_path(phase).unlink(missing_ok=True)

    def close(self, *, in_use: bool) -> None:
        """The run is over. A folder that goes with it goes now, unless a planner still works there."""
        if self._passing is not None and not in_use:
            shutil.rmtree(self._passing.name, ignore_errors=True)


def _suffix(phase: int) -> str:
    return f"-{phase + 1}" if phase else ""


def _folder() -> Path | None:
    folder = Path.cwd() / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        if not (folder / ".gitignore").exists():
            write_atomic(folder / ".gitignore", _README.encode())
    except (OSError, MemoptError):
        return None
    return folder if os.access(folder, os.W_OK) else None


def _key(script: Script, conditions: dict[str, object]) -> str:
    """Names the script, its arguments and folder, the versions, and `conditions`."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    known = {
        "argv": script.argv,
        "as_module": script.as_module,
        "cwd": script.cwd,
        "script": script.sha256,
        "memopt": VERSION,
        "torch": installed,
        "python": script.python,
        "rank": os.environ.get("RANK", ""),
        "world": os.environ.get("WORLD_SIZE", ""),
        **conditions,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:12]
