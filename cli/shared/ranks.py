"""File names where several processes run one script, as under torchrun: each rank writes a file of its own."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from memopt.errors import UsageError


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
