"""Where several processes run one script, as under torchrun: each rank writes a file of its own, and the first of a machine tells of all."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.errors import MemoptError, UsageError

if TYPE_CHECKING:
    from memopt.outcome import Outcome

_WAITED_S = 10.0
"""For the others' outcomes, once the first rank has its own."""


def rank_here() -> int | None:
    """This process's rank; None where it is the only one."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "1")
    return int(rank) if rank.isdecimal() and world not in ("", "0", "1") else None


def gathered(outcome: Outcome) -> dict[int, Outcome] | None:
    """Rank -> outcome, of all ranks of this machine, in its first one; None in the others, whose outcome is left for that one.

    A rank whose outcome does not come within ten seconds is missing. Alone, or where nothing can be left, a rank has its own.
    """
    rank = rank_here()
    count, local = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("LOCAL_RANK", "")
    if rank is None or not (count.isdecimal() and local.isdecimal()):
        return {rank or 0: outcome}
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return {rank: outcome}
        if local != "0":
            outcome.save(folder / f"{rank}.json")
            return None
    except (OSError, MemoptError):
        return {rank: outcome}
    return {rank: outcome, **_others(folder, int(count) - 1)}


def _folder() -> Path:
    """One for each run: all ranks of a machine have one parent."""
    names = (
        str(os.getuid()),
        str(os.getppid()),
        *(os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")),
    )
    return Path(tempfile.gettempdir()) / f"memopt-outcomes-{'-'.join(names)}"


def _others(folder: Path, count: int) -> dict[int, Outcome]:
    from memopt.outcome import load_outcome

    found: dict[int, Outcome] = {}
    ends = time.monotonic() + _WAITED_S
    while len(found) < count and time.monotonic() < ends:
        for path in folder.glob("[0-9]*.json"):
            if path.stem.isdecimal() and int(path.stem) not in found:
                with contextlib.suppress(MemoptError):
                    found[int(path.stem)] = load_outcome(path)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def path_of_rank(name: str, ending: str) -> Path:
    """The file `name` with %p, %r, %h and %% filled in. Raises `UsageError` where every rank would write the same one."""
    rank = os.environ.get("RANK", "")
    path = expand(name, rank)
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") and path == expand(name, "other"):
        raise UsageError(
            f"every rank would write {name}",
            why=f"{os.environ['WORLD_SIZE']} processes run this script",
            try_=f"NAME-%r{ending}, where %r is the rank",
        )
    return Path(path).absolute()


def expand(name: str, rank: str) -> str:
    """`name` with %p (process), %r (rank), %h (host) and %% filled in."""
    filled = {"%p": str(os.getpid()), "%r": rank or "0", "%h": socket.gethostname(), "%%": "%"}
    parts = []
    while name:
        parts.append(filled.get(name[:2], name[:1]))
        name = name[2:] if name[:2] in filled else name[1:]
    return "".join(parts)
