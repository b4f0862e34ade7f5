"""What memory there is to be had: the budget of a run for which none was given."""

from __future__ import annotations

from pathlib import Path

_SHARE = 0.95
"""Of what is free on the host, where other programs live too."""


def free_bytes(kind: str) -> int | None:
    """Bytes that this process may take on a device of type `kind`, those that it has already included. None: not known.

    On a GPU its CUDA context counts too, on the host only what tensors may take.
    """
    if kind == "cpu":
        known = [each for each in (_available(), _left_of_the_cgroup()) if each is not None]
        return int(_SHARE * min(known)) if known else None
    import torch

    if kind != "cuda" or not torch.cuda.is_available():
        return None
    free = int(torch.cuda.mem_get_info()[0])
    from memopt.instrument.cuda_statistics import process_bytes

    return free + (process_bytes(torch.cuda.current_device()) or torch.cuda.memory_reserved())


def _available() -> int | None:
    """`MemAvailable`: what can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _left_of_the_cgroup() -> int | None:
    """Of the container's own limit (version 2, then 1); None where there is none."""
    for folder, most, now in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / most).read_text().strip()
            used = int((folder / now).read_text())
            statistics = (folder / "memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if not limit.isdecimal() or int(limit) >= 2**60:
            return None
        cached = sum(
            int(line.split()[1]) for line in statistics.splitlines() if line.startswith("inactive_file ")
        )
        return max(0, int(limit) - used + cached)
    return None
