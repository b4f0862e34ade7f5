"""`apply --verify N`: the script plain and enforced, in two processes with the same seeds, compared bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from memopt.enforcers.verify.child import outcome_beside
from memopt.enforcers.verify.own_files import made_beside, overwrites_beside
from memopt.enforcers.verify.scratch import copy_folder, moved, script_as_seen_from_a_copy
from memopt.enforcers.verify.spread import Lines, beside_the_spread
from memopt.errors import UsageError, VerifyFailed
from memopt.outcome import Outcome

_BOOTSTRAP = "import sys; sys.path.insert(0, {root!r}); from memopt.enforcers.verify.child import child; sys.path.remove({root!r}); child()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Iterations that were the same bit for bit, and what the plan did in them."""

    iterations: int
    exit_code: int
    """Of either run: a script that fails by itself fails twice."""
    outcome: Outcome | None
    """None where the script ended by other means than its end."""

    left: tuple[str, ...]
    """Files that the runs made outside of the copies of the folder, and left there."""


def verify(
    plan_path: Path,
    argv: list[str],
    steps: int,
    swap_dir: Path,
    *,
    deterministic: bool = False,
    in_place: bool = False,
) -> Verified:
    """Compare `steps` iterations, with torch's deterministic algorithms if asked. Raises `VerifyFailed` at the first difference, and where there was nothing to compare.

    Each run has a copy of the present folder, so that it resumes from no checkpoint that another one has left; with `in_place`
    they all run in it. Raises `UsageError` before one of them overwrites a file of the user's outside of the copy.
    """
    where = None if in_place else Path.cwd()
    runs = _Runs(plan_path, argv, steps, swap_dir, deterministic, where)
    plain, code, _ = runs.run("plain", 0)
    enforced, enforced_code, outcome = runs.run("enforced", 1)
    if not plain:
        raise VerifyFailed(
            "nothing could be compared",
            why=f"the plain run ended with exit code {code} before an iteration was over",
            try_="the script by itself, with arguments that make it train",
        )
    difference = _difference(plain, enforced)
    if not difference and code != enforced_code:
        difference = f"the plain run ended with exit code {code}, the enforced one with {enforced_code}"
    if difference:
        raise _failure(runs, plain, enforced, difference)
    if outcome is not None and outcome.actions.planned and not outcome.actions.done:
        raise VerifyFailed(
            "nothing was verified: none of the plan's actions was taken",
            why="; ".join(outcome.notes) or "the script ended before one was due",
            try_="memopt profile and memopt advise again, for the script as it is now",
        )
    return Verified(iterations=len(plain), exit_code=code, outcome=outcome, left=runs.left())


@dataclass(frozen=True, slots=True)
class _Runs:
    """What all runs have in common."""

    plan_path: Path
    argv: list[str]
    steps: int
    swap_dir: Path
    deterministic: bool
    copy_of: Path | None
    """The folder that each run has a copy of; none: they run in the present one."""

    began: float = field(default_factory=lambda: time.time() - 0.05)
    """A file system's clock goes in ticks."""

    _made: set[str] = field(default_factory=set)

    def left(self) -> tuple[str, ...]:
        return tuple(sorted(path for path in self._made if os.path.exists(path)))

    def run(self, way: str, number: int) -> tuple[Lines, int, Outcome | None]:
        """Digests of each iteration, the exit code, and what the plan came to; `way` is plain or enforced."""
        mode = f"{way}-deterministic" if self.deterministic else way
        root = Path(__file__).resolve().parents[2]
        code = _BOOTSTRAP.format(root=str(root.parent if root.name == "memopt" else root))
        with tempfile.TemporaryDirectory(prefix="memopt-verify-") as folder:
            out = Path(folder) / "digests.jsonl"
            told, work, argv = outcome_beside(out), self.copy_of, self.argv
            if self.copy_of is not None:
                work = Path(folder) / self.copy_of.name
                copy_folder(self.copy_of, work)
                argv = [script_as_seen_from_a_copy(argv[0], self.copy_of), *argv[1:]]
                argv = [moved(word, self.copy_of, work) for word in argv]
            words = [
                self.plan_path.absolute(),
                mode,
                self.steps,
                out,
                self.swap_dir.absolute(),
                self.copy_of or "",
                self.began,
                *argv,
            ]
            done = subprocess.run(
                [sys.executable, "-c", code, *map(str, words)],
                stdout=subprocess.DEVNULL,
                check=False,
                cwd=work,
                env=_apart(os.environ, number),
            )
            self._made.update(_lines_of(made_beside(out)))
            if overwrites := _lines_of(overwrites_beside(out)):
                raise _would_overwrite(overwrites[0])
            lines = _lines_of(out)
            outcome = msgspec.json.decode(told.read_bytes(), type=Outcome) if told.exists() else None
        return [json.loads(line) for line in lines], done.returncode, outcome


def _lines_of(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def _failure(runs: _Runs, plain: Lines, enforced: Lines, difference: str) -> VerifyFailed:
    """What to say of two runs that differ: whether the script, or the plan, gives the same twice."""
    for number, (way, first) in enumerate((("plain", plain), ("enforced", enforced), ("plain", plain)), 2):
        again, _, _ = runs.run(way, number)
        if _difference(first, again):
            third, _, _ = runs.run("plain", 5)
            plains = [plain, third, again] if way == "plain" else [plain, third]
            return VerifyFailed(
                f"the runs differ, but so do two {way} runs: the script does not repeat by itself",
                why=f"{_difference(first, again)}; {beside_the_spread(enforced, plains)}",
                try_="--deterministic, or fixed seeds in the script" + _resumed(runs.left()),
            )
    return VerifyFailed(
        "the enforced run differs from the plain one",
        why=difference,
        try_="please report this plan and script: it is a bug",
    )


def _resumed(left: tuple[str, ...]) -> str:
    return f"; or no files outside of its folder, which the next run finds there: {left[0]}" if left else ""


def _would_overwrite(path: str) -> UsageError:
    return UsageError(
        f"the script overwrites {path}, which lies outside of the copy of its folder that each run has",
        why="the compared runs would both write there; the first was ended before it did",
        try_="arguments that have it write elsewhere (memopt apply PLAN --verify N -- ARGUMENTS), or --in-place, where that file does not matter",
    )


def _apart(environment: Mapping[str, str], number: int) -> dict[str, str]:
    """The environment of run `number`: under torchrun it meets the same run of the other ranks, at a store of its own."""
    found = dict(environment)
    if "WORLD_SIZE" in found and found.get("MASTER_PORT", "").isdecimal():
        found["MASTER_PORT"] = str(1024 + (int(found["MASTER_PORT"]) - 1023 + number) % (2**16 - 1024))
        found["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return found


def _difference(a: Lines, b: Lines) -> str:
    for number, (left, right) in enumerate(zip(a, b, strict=False), 1):
        for part in ("losses", "gradients", "parameters and buffers"):
            if left[part] != right[part]:
                names = [name for name in left[part] if left[part][name] != right[part].get(name)]
                return f"iteration {number}: {part} differ, first {names[0] if names else 'in number'}"
    if len(a) != len(b):
        return f"{len(a)} iterations against {len(b)}"
    return ""
