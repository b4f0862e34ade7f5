"""The folder that `--swap-dir` names."""

from __future__ import annotations

from pathlib import Path

from memopt.errors import UsageError
from memopt.files import swap_folder


def require_folder(typed: Path | None) -> Path:
    """The folder for the swap file; what was not `typed` is the system's. Raises `UsageError` where there is no such folder."""
    folder = swap_folder(typed)
    if typed is not None and not folder.is_dir():
        raise UsageError(
            f"nothing can be swapped to {typed}", why="there is no such folder", try_=f"mkdir -p {typed}"
        )
    return folder
