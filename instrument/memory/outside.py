"""What the process once held beyond what it holds now: loading, preparation, an evaluation, whatever nobody watched."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from memopt.trace import BEFORE_TRAINING, Trace
from memopt.units import format_bytes

CLEARLY_BYTES = 128 << 20
CLEARLY = 1.1
"""Less than both above a measured peak is no other peak: a resident set has more in it than tensors, and what has gone back of it (80 MB of a
run whose tensors came to 7) lay in pieces that were not in use."""


def was_above_now_bytes(kind: str, status: Path = Path("/proc/self/status")) -> int:
    """How far the most that was ever held lies above what is held now, on a device of `kind`; 0 where nobody knows.

    On a CPU it is the process's resident set that is asked, on a GPU the caching allocator.
    """
    if kind == "cuda":
        import torch

        if not torch.cuda.is_initialized():
            return 0
        from memopt.instrument.memory.cuda_statistics import statistics_of

        statistics = statistics_of(torch.cuda.current_device())
        return max(0, statistics.peaks_of_the_script()[0] - torch.cuda.memory_allocated())
    return max(0, _kilobytes(status, "VmHWM:") - _kilobytes(status, "VmRSS:")) * 1024


def resident_bytes(pages: Path = Path("/proc/self/statm")) -> int:
    """Of this process; 0 where the system does not tell."""
    try:
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def give_back_free_pages() -> None:
    """All that is free in glibc's heap goes back to the system; nothing happens where there is another allocator."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_clearly_more(held_bytes: int, peak_bytes: int) -> bool:
    """Is `held_bytes` another peak than `peak_bytes`?"""
    return held_bytes > max(peak_bytes + CLEARLY_BYTES, CLEARLY * peak_bytes)


def before_training(trace: Trace, peak_bytes: int) -> str:
    """What to say where more was held before the first forward than an iteration of `trace` holds at most, which are `peak_bytes`."""
    held_bytes = trace.facts.get(BEFORE_TRAINING, 0)
    if not is_clearly_more(held_bytes, peak_bytes):
        return ""
    return (
        f"before the first iteration (loading, preparation) at least {format_bytes(held_bytes)} were held, more than any iteration "
        f"needs ({format_bytes(peak_bytes)}): a plan changes iterations only"
    )


def _kilobytes(status: Path, name: str) -> int:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
