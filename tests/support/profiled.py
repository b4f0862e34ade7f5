"""Profiles scripts through the command line, for the tests, and asks questions of the traces."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.device import Device
from memopt.trace import CATEGORIES, PHASES, Trace, load_trace
from tests.support import warm

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent.parent / "scripts"
Measure = Callable[..., Device]


@dataclass(frozen=True, slots=True)
class Run:
    """One `memopt profile`: how it ended, and the trace if there is one."""

    returncode: int
    stdout: str
    stderr: str
    path: Path

    @property
    def trace(self) -> Trace:
        return load_trace(self.path)


class Profiler:
    """`profile(script, *args)` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._env = {
            k: v for k, v in os.environ.items() if not k.startswith(("MEMOPT_", "RANK", "WORLD_SIZE"))
        }

    def __call__(self, script: str, *args: str, options: tuple[str, ...] = ("--keep-running",)) -> Run:
        self._count += 1
        path = self._folder / f"{self._count}.profile.json.gz"
        done = self.memopt("profile", "-o", str(path), *options, str(SCRIPTS / script), *args)
        return Run(done["returncode"], done["stdout"], done["stderr"], path)

    def memopt(self, *args: str) -> dict:
        done = warm.python(["-m", "memopt", *args], cwd=self._folder, env=self._env)
        return {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def measured_once(measure: Measure) -> Measure:
    """As `memopt.profiler.timing.bandwidth.measure_device`, which writes a file of 48 MiB each time; for each file system once.

    What a profile does with the rates of this machine is tested, not they themselves."""
    known: dict[tuple[str, int], Device] = {}

    def measured(kind: str, swap_dir: Path, room_bytes: int | None = None, disk: Any = None) -> Device:
        if not os.access(swap_dir, os.W_OK):
            return measure(kind, swap_dir)
        where = kind, os.stat(swap_dir).st_dev
        if where not in known:
            known[where] = measure(kind, swap_dir)
        return known[where]

    return measured


@contextmanager
def profiler(folder: Path) -> Iterator[Profiler]:
    yield Profiler(folder)


def unexplained(trace: Trace) -> list[int]:
    """Per op: bytes on the device when it starts that no living storage explains."""
    s, n = trace.storages, trace.op_count
    change = [0] * (n + 2)
    for size, birth, death, found in zip(
        s.size_bytes, s.birth_op, s.death_op, made_by_no_op(trace), strict=True
    ):
        change[max(0, birth if found else birth + 1)] += size
        change[min(n, death) + 1] -= size
    held, rest = 0, []
    for op in range(n):
        held += change[op]
        rest.append(trace.ops.live_bytes[op] - held)
    return rest


def made_by_no_op(trace: Trace) -> list[bool]:
    """Per storage: is its first value of no op, though it appeared inside the iteration?"""
    made = [birth >= 0 for birth in trace.storages.birth_op]
    for storage, producer in zip(trace.values.storage, trace.values.producer, strict=True):
        if producer >= 0 and producer == trace.storages.birth_op[storage]:
            made[storage] = False
    return made


def largest(trace: Trace, category: str) -> list[str]:
    """Labels of the storages of `category`, the largest first."""
    s = trace.storages
    rows = [i for i, kind in enumerate(s.category) if CATEGORIES[kind] == category]
    return [trace.storage_label(i) for i in sorted(rows, key=lambda i: -s.size_bytes[i])]


def bytes_of(trace: Trace, category: str) -> int:
    s = trace.storages
    return sum(
        size for size, kind in zip(s.size_bytes, s.category, strict=True) if CATEGORIES[kind] == category
    )


def ops_of(trace: Trace, phase: str) -> list[str]:
    return [trace.op_name(op) for op in range(trace.op_count) if PHASES[trace.ops.phase[op]] == phase]


def plain(script: str, *args: str) -> subprocess.CompletedProcess:
    """The script under plain python."""
    return warm.python([str(SCRIPTS / script), *args])
