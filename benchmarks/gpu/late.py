"""memopt with the CPU's memory as a late device's: `python -m benchmarks.gpu.late apply PLAN ...`, for the campaign's dry run.

Tiers then copy as they do beside a GPU, in a random order of its streams, and a race or a wrong byte ends the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import pytest

from memopt.cli.main import main as memopt
from tests.late.late_session import LateCpu, late_cpu


@contextlib.contextmanager
def late_device() -> Iterator[LateCpu]:
    """Tiers that are opened in here are on one. `MEMOPT_LATE_SEED` is the order's number."""
    seed = int(os.environ.get("MEMOPT_LATE_SEED", "0"))
    with pytest.MonkeyPatch.context() as patch, late_cpu(patch, seed) as (device, _):
        yield device


def main() -> None:
    """Run memopt's command line in this process, and end as it ends."""
    with late_device() as device:
        try:
            memopt()
        finally:
            print(f"the late device moved {device.uses_told} storages", file=sys.stderr)


if __name__ == "__main__":
    main()
