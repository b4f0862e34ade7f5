"""Lines of the script itself, where they are still what was profiled: nothing else of the reader's disk gets into a report."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

from memopt.trace import Script

_AROUND = 2
_MOST_BYTES = 4 * 2**20


class Source:
    """The file of `script`, if it is there and its hash is the one that was recorded."""

    def __init__(self, script: Script) -> None:
        self._script = script

    @cached_property
    def _lines(self) -> list[str]:
        script = self._script
        if script.as_module or not script.argv or not script.sha256:
            return []
        path = Path(script.cwd, script.argv[0])
        try:
            if not path.is_file() or path.stat().st_size > _MOST_BYTES:
                return []
            data = path.read_bytes()
        except (OSError, ValueError):
            return []
        if hashlib.sha256(data).hexdigest() != script.sha256:
            return []
        return data.decode("utf-8", errors="replace").splitlines()

    def around(self, line: str) -> list[tuple[int, str, bool]]:
        """(number, text, is it the line itself) for the lines around `train.py:41`; empty where they are not known."""
        name, _, number = line.rpartition(":")
        if not number.isdecimal() or Path(name).name != Path((self._script.argv or [""])[0]).name:
            return []
        at = int(number)
        first, last = max(1, at - _AROUND), min(len(self._lines), at + _AROUND)
        return [(i, self._lines[i - 1], i == at) for i in range(first, last + 1)] if at <= last else []

    def line(self, place: str) -> str:
        """What stands at `train.py:41`, without its indentation; empty where it is not known."""
        return next((text.strip() for _, text, hit in self.around(place) if hit), "")
