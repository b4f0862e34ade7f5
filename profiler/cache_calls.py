"""Counts calls of `torch.cuda.empty_cache` and `torch.accelerator.empty_cache` by line, while an iteration is recorded.

The functions stand in for the originals only in the modules that hold them: a name that the script has imported by itself is not seen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from memopt.instrument.script.lines import user_line

_NAME = "empty_cache"


class CacheCalls:
    """Counts into `counts` between `install` and `remove`."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts
        self._originals: list[tuple[Any, Any]] = []

    def install(self) -> None:
        for owner in (torch.cuda, torch.cuda.memory, getattr(torch, "accelerator", None)):
            original = getattr(owner, _NAME, None)
            if original is not None:
                self._originals.append((owner, original))
                setattr(owner, _NAME, self._counting(original))

    def _counting(self, original: Any) -> Any:
        @functools.wraps(original)
        def empty_cache(*args: Any, **kwargs: Any) -> Any:
            line = user_line()
            self._counts[line] = self._counts.get(line, 0) + 1
            return original(*args, **kwargs)

        return empty_cache

    def remove(self) -> None:
        for owner, original in self._originals:
            setattr(owner, _NAME, original)
        self._originals.clear()
