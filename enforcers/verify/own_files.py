"""A compared run ends before it overwrites a file of the user's: what a script names by an absolute path lies in no copy of its folder."""

from __future__ import annotations

import functools
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from memopt.enforcers.verify.scratch import LEFT_OUT
from memopt.instrument.script.audited import opens_to_write
from memopt.instrument.script.on_import import call_after_import

EXIT_CODE = 97
"""Of a run that was ended so."""


class OwnFiles:
    """Sees what Python, `torch.save` and safetensors write; other compiled code writes unseen.

    A file outside of the folder of `beside`, in which the copy lies, is the user's if it held something before `since` (seconds since the
    epoch). What is made there is noted.
    Temporary files, caches and other hidden files, and Python's own are not, unless they lie below `source`, the folder that was copied.
    """

    def __init__(self, source: Path, since: float, beside: Path) -> None:
        self._source = os.path.realpath(source)
        self._since = since
        self._runs = os.path.realpath(beside.parent)
        """The folder of this run, with the copy in it."""
        self._overwrites, self._made = overwrites_beside(beside), made_beside(beside)
        self._never = tuple(
            os.path.realpath(folder)
            for folder in (tempfile.gettempdir(), sys.prefix, sys.base_prefix, "/dev", "/proc", "/sys")
        )
        self._seen: set[str] = set()

    def install(self) -> None:
        """Watch this process, and what is forked from it."""
        sys.addaudithook(self._audited)
        call_after_import("torch", lambda: self._wrap("torch", "save", "f"))
        call_after_import("safetensors.torch", lambda: self._wrap("safetensors.torch", "save_file", "filename"))  # fmt: skip

    def _audited(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            if opens_to_write(values):
                self.is_written(values[0])
        elif event == "os.rename":
            self.is_written(values[0])
            self.is_written(values[1])
        elif event == "os.truncate" or (event == "os.remove" and values[1] == -1):
            self.is_written(values[0])
        elif event == "shutil.rmtree":
            for folder, _, names in os.walk(values[0]):
                for name in names:
                    self.is_written(os.path.join(folder, name))

    def _wrap(self, module: str, name: str, keyword: str) -> None:
        """Look at what `module.name` is given as `keyword`, its second argument."""
        function = getattr(sys.modules[module], name)

        @functools.wraps(function)
        def looked_at(*values: Any, **named: Any) -> Any:
            self.is_written(named.get(keyword, values[1] if len(values) > 1 else None))
            return function(*values, **named)

        setattr(sys.modules[module], name, looked_at)

    def is_written(self, file: object) -> None:
        """End the process if `file`, a path, is the user's."""
        if not isinstance(file, (str, bytes, os.PathLike)):
            return
        path = os.path.realpath(os.fsdecode(file))
        if path in self._seen or not self._is_the_users(path):
            return
        self._seen.add(path)
        try:
            found = os.stat(path)
        except OSError:
            self._note(self._made, path)
            return
        if found.st_ctime >= self._since or not found.st_size or not stat.S_ISREG(found.st_mode):
            return
        self._note(self._overwrites, path)
        os._exit(EXIT_CODE)

    def _is_the_users(self, path: str) -> bool:
        where = Path(path)
        if where.is_relative_to(self._runs) or where.suffix == ".pyc" or LEFT_OUT & set(where.parts):
            return False
        if where.is_relative_to(self._source):
            return True
        return not any(map(where.is_relative_to, self._never)) and "/." not in path

    def _note(self, file: Path, path: str) -> None:
        with file.open("ab") as out:
            out.write(os.fsencode(path) + b"\n")


def overwrites_beside(digests: Path) -> Path:
    """Where a run names the file of the user's that it would have overwritten."""
    return digests.with_name("overwrites")


def made_beside(digests: Path) -> Path:
    """Where a run names the files that it has made outside of the copy, a line each."""
    return digests.with_name("made")
