"""What the callbacks of all trainers do: record, enforce a plan, and tell the peak of each step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

PEAK = "memopt/peak_bytes"
"""Most bytes of tensors on the accelerator since the last figure was told."""
PROCESS = "memopt/process_bytes"
"""Without an accelerator: the largest resident set of the process so far."""


class Steps:
    """Give `profile` a path to record a steady iteration there, `plan` a plan's path to run under it, or both but not at once."""

    def __init__(self, *, profile: str | Path | None = None, plan: str | Path | None = None) -> None:
        if profile is not None and plan is not None:
            from memopt.errors import UsageError

            raise UsageError(
                "a run is recorded or runs under a plan",
                why="both were given",
                try_="one of profile= and plan=",
            )
        self._profile, self._plan = profile, plan
        self._stack: contextlib.ExitStack | None = None
        self.result: Any = None
        """Once training has ended: what `memopt.profile()` or `memopt.enforce()` gave."""

    def begin(self) -> None:
        """Training begins. Raises what `memopt.profile` and `memopt.enforce` do."""
        from memopt import api

        self._stack = contextlib.ExitStack()
        if self._profile is not None:
            self.result = self._stack.enter_context(api.profile(self._profile, force=True))
        elif self._plan is not None:
            self.result = self._stack.enter_context(api.enforce(self._plan))
        self.figures()

    def end(self, error: BaseException | None = None, trace: TracebackType | None = None) -> None:
        """Training has ended, by `error` if one is given."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(type(error) if error is not None else None, error, trace)

    def figures(self) -> dict[str, float]:
        """The peak since the last call, under the name of a metric."""
        import torch

        if torch.accelerator.is_available():
            device = torch.accelerator.current_device_index()
            peak = float(torch.accelerator.max_memory_allocated(device))
            torch.accelerator.reset_peak_memory_stats(device)
            return {PEAK: peak}
        import resource

        return {PROCESS: 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
