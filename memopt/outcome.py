"""Outcome: what a run under a plan came to, predicted beside measured. JSON, versioned."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from memopt.errors import BadFile
from memopt.files import read_bytes, write_atomic
from memopt.versioned import decode_versioned

SCHEMA: Final = "memopt.outcome/1"
MOVED_BESIDE: Final = "where iterations took more than was planned for"
"""How a note of what was moved beside the plan begins."""


class ActionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Actions of the plan, by what became of them."""

    planned: int
    done: int
    skipped: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes are peaks over a step, times are medians of steps. None: not measured."""

    schema: Literal["memopt.outcome/1"] = SCHEMA
    budget_bytes: int
    unplanned_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    plain_step_ms: float
    predicted_step_ms: float
    measured_step_ms: float | None
    actions: ActionCounts
    divergences: int
    """Times that the run did other ops than the profiled one; each lost savings until the next module boundary."""
    process_peak_bytes: int = 0
    """Largest resident set of the process before torch's profiler was started to measure; 0 when not known."""
    allocated_peak_bytes: int = 0
    """On a GPU: what the caching allocator had handed out at most, over the whole run, each block rounded up; 0 elsewhere."""
    reserved_peak_bytes: int = 0
    """On a GPU: what it had taken from the driver at most."""
    on_device_bytes: int = 0
    """On a GPU: what the driver counts for the process at the end, context and kernels included, as nvidia-smi shows; 0 where unknown."""
    outside_peak_bytes: int = 0
    """About what was held at most outside the measured iterations (loading, evaluation), where it was clearly more; 0 elsewhere."""
    steps: int = 0
    """Iterations that were enforced."""
    other_steps: int = 0
    """Those of them, but for the first, in which autograd saved other tensors than in the profiled one: another number of them, or elements by
    half a per cent more or fewer."""
    as_profiled_step_ms: float | None = None
    """Median of what such steps would have taken with as many elements as in the profiled one, by the elements that each saved; None where those
    that were timed saved as many."""
    waited_share: float = 0.0
    """Of the time of all iterations: what the training thread was ready to run and other processes had the processor. Times of steps leave it out."""
    notes: list[str] = []
    """What the reader should know: why actions were skipped, where the run left the plan, ..."""

    @property
    def compared_step_ms(self) -> float | None:
        """What is held against the plain and the predicted step, which are of the profiled iteration."""
        return self.measured_step_ms if self.as_profiled_step_ms is None else self.as_profiled_step_ms

    def save(self, path: Path) -> None:
        """Write the outcome, indented, whole or not at all."""
        write_atomic(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load_outcome(path: Path) -> Outcome:
    """The outcome at `path`. Raises `BadFile` when it is not one of this version, or its figures cannot be meant."""
    found = decode_versioned(read_bytes(path, "outcome"), Outcome, SCHEMA, path, "outcome")
    sizes = (
        found.budget_bytes,
        found.unplanned_peak_bytes,
        found.predicted_peak_bytes,
        found.measured_peak_bytes or 0,
    )
    times = (
        found.plain_step_ms,
        found.predicted_step_ms,
        found.measured_step_ms or 0.0,
        found.as_profiled_step_ms or 0.0,
    )
    if not (all(0 <= size < 2**62 for size in sizes) and all(0 <= time < 1e12 for time in times)):
        raise BadFile(
            f"{path} is not a usable outcome",
            why="a number of bytes or a time is negative, or beyond any machine",
            try_="memopt apply PLAN --outcome FILE, to write it again",
        )
    return found
