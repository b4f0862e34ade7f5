"""Copies of the folder that a script runs in: two runs that are compared find the same files, and the script's own stay as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from memopt.errors import UsageError
from memopt.units import format_bytes

MOST_BYTES = 2**30
MOST_FILES = 20_000
_LEFT_OUT = {".git", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def copy_folder(source: Path, target: Path) -> None:
    """What is in `source`, in `target`, a new folder. Links lead where they led; environments and caches are left out.

    Raises `UsageError` for a folder of more than 1 GiB or 20,000 files.
    """
    files = size = 0
    for folder, names, here in os.walk(source):
        names[:] = [name for name in names if not _left_out(Path(folder, name))]
        files += len(here)
        size += sum(Path(folder, name).lstat().st_size for name in here)
        if files > MOST_FILES or size > MOST_BYTES:
            raise UsageError(
                f"{source} is too large to be copied for each of the runs",
                why=f"it holds more than {MOST_FILES:,} files or {format_bytes(MOST_BYTES)}, and the script may overwrite some of them",
                try_="--in-place, where the script writes nothing that matters, or from a smaller folder",
            )
    shutil.copytree(source, target, symlinks=True, ignore=_ignored)
    for folder, names, here in os.walk(target):
        for name in (*names, *here):
            link = Path(folder, name)
            if link.is_symlink() and not os.path.isabs(os.readlink(link)):
                original = source / Path(folder).relative_to(target) / os.readlink(link)
                link.unlink()
                link.symlink_to(original)


def moved(word: str, source: Path, target: Path) -> str:
    """The path `word`, if it is an absolute one below `source`, as it is below `target`."""
    path = Path(word)
    return (
        str(target / path.relative_to(source)) if path.is_absolute() and path.is_relative_to(source) else word
    )


def _left_out(path: Path) -> bool:
    return path.name in _LEFT_OUT or (path / "pyvenv.cfg").exists()


def _ignored(folder: str, names: list[str]) -> set[str]:
    odd = {
        n
        for n in names
        if not (Path(folder, n).is_dir() or Path(folder, n).is_file() or Path(folder, n).is_symlink())
    }
    return odd | {name for name in names if Path(folder, name).is_dir() and _left_out(Path(folder, name))}
