"""What a person asks to run: a script or a module, and the file that python would find for it."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from memopt.errors import UsageError, reason


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: a script or, with `as_module`, a module; `argv[0]` is its name as typed."""

    argv: tuple[str, ...]
    as_module: bool = False

    @property
    def stem(self) -> str:
        """Short name for files: `train` of `src/train.py` or of `pkg.train`."""
        name = self.argv[0]
        return name.rpartition(".")[2] if self.as_module else Path(name).stem

    @property
    def in_words(self) -> str:
        """`python -m pkg.train --epochs 1`."""
        return shlex.join(("python", *(("-m",) if self.as_module else ()), *self.argv))


def find_source(command: Command) -> Path:
    """File that holds the code of `command`. Raises `UsageError` when there is none that python could run."""
    if command.as_module:
        return Path(module_spec(command.argv[0]).origin or "")
    path = Path(command.argv[0])
    if path.suffix == ".ipynb":
        raise UsageError(
            f"cannot run {path}",
            why="it is a notebook, not a Python script",
            try_=f"jupyter nbconvert --to script {path}, then the script",
        )
    try:
        if path.is_dir():
            path = path / "__main__.py"
            if not path.is_file():
                raise UsageError(
                    f"cannot run {command.argv[0]}",
                    why="it is a folder without __main__.py",
                    try_="name the script",
                )
        with path.open("rb") as file:
            head = file.read(4096)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot run {path}",
            why=reason(error),
            try_="the path of a Python script; within a shell script, memopt goes before the python command",
        ) from error
    if b"\0" in head:
        raise UsageError(
            f"cannot run {path}",
            why="it is a binary file, not Python source",
            try_="the path of a Python script",
        )
    return path


def module_spec(name: str) -> importlib.machinery.ModuleSpec:
    """Where python finds `name`. Packages above it are not imported, unless only their own code can tell where it is."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        spec = _spec_on_path(name) or importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = _spec_on_path(name) or importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        spec = None
    finally:
        sys.path.remove(here)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UsageError(
            f"cannot run module {name}",
            why=f"python finds no such module to run from {here}",
            try_="its full name",
        )
    return spec


def _spec_on_path(name: str) -> importlib.machinery.ModuleSpec | None:
    """Nothing is imported to find it."""
    places, above, spec = None, "", None
    for part in name.split("."):
        above += part
        with contextlib.suppress(
            KeyError
        ):  # a namespace package looks for the one above it among the imported ones
            spec = importlib.machinery.PathFinder.find_spec(above, places)
        if spec is None or above == name:
            return spec
        if spec.submodule_search_locations is None:
            return None
        places, above, spec = list(spec.submodule_search_locations), f"{above}.", None
    return None
