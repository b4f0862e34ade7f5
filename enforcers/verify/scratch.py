"""Copies of the folder that a script runs in: two runs that are compared find the same files, and the script's own stay as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from memopt.errors import UsageError
from memopt.units import format_bytes

MOST_BYTES = 2**30
MOST_FILES = 20_000
LEFT_OUT = {".git", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def copy_folder(source: Path, target: Path) -> None:
    """What is in `source`, in `target`, a new folder. Links into it lead into the copy, others where they led; environments and caches are left out.

    Raises `UsageError` for a folder of more than 1 GiB or 20,000 files.
    """
    files = size = 0
    for folder, names, here in os.walk(source):
        names[:] = [name for name in names if not _left_out(Path(folder, name), target)]
        files += len(here)
        size += sum(Path(folder, name).lstat().st_size for name in here)
        if files > MOST_FILES or size > MOST_BYTES:
            raise UsageError(
                f"{source} is too large to be copied for each of the runs",
                why=f"it holds more than {MOST_FILES:,} files or {format_bytes(MOST_BYTES)}, and the script may overwrite some of them",
                try_="--in-place, where the script writes nothing that matters, or from a smaller folder",
            )
    shutil.copytree(
        source, target, symlinks=True, ignore=lambda folder, names: _ignored(folder, names, target)
    )
    for folder, names, here in os.walk(target):
        for name in (*names, *here):
            link = Path(folder, name)
            if link.is_symlink():
                _lead_on(link, source / Path(folder).relative_to(target), source, target)


def _lead_on(link: Path, was_in: Path, source: Path, target: Path) -> None:
    """A link into the folder leads into the copy, any other where it led."""
    led_to = os.path.normpath(was_in / os.readlink(link))
    link.unlink()
    link.symlink_to(moved(led_to, source, target))


def moved(word: str, source: Path, target: Path) -> str:
    """The path `word` (or `--flag=path`), if it is an absolute one below `source`, as it is below `target`."""
    flag, equals, value = word.partition("=")
    if equals and flag.startswith("-"):
        return f"{flag}={moved(value, source, target)}"
    path = Path(os.path.normpath(word))
    return str(target / path.relative_to(source)) if path.is_relative_to(source) else word


def script_as_seen_from_a_copy(script: str, source: Path) -> str:
    """The path `script`, which python finds from `source`, absolute where it leaves that folder: a copy lies elsewhere."""
    found = os.path.normpath(source / script)
    leaves = not Path(found).is_relative_to(source) or Path(script).parts[:1] == ("..",)
    return found if leaves else script


def _left_out(path: Path, target: Path) -> bool:
    """Caches, environments, and the folder that the copy itself is made in."""
    return path.name in LEFT_OUT or (path / "pyvenv.cfg").exists() or path in (target, *target.parents)


def _ignored(folder: str, names: list[str], target: Path) -> set[str]:
    odd = {
        n
        for n in names
        if not (Path(folder, n).is_dir() or Path(folder, n).is_file() or Path(folder, n).is_symlink())
    }
    return odd | {
        name for name in names if Path(folder, name).is_dir() and _left_out(Path(folder, name), target)
    }
