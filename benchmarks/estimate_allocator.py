"""Benchmark 1 of `memopt estimate`: the simulated caching allocator against recorded ones, and its speed.

`python benchmarks/estimate_allocator.py [folder of traces]`; the folder defaults to ../shared/groundtruth/traces, else tests/data.
Columns: allocations at the recorded address, events after which reserved is as recorded, peak reserved (MiB) recorded and
replayed; then from an empty allocator: peak reserved and its error, and the smallest device memory on which it runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from memopt.estimators.allocator.replay import AllocatorEvents, replay, smallest_that_runs
from memopt.estimators.allocator.settings import MIB, AllocatorSettings
from memopt.estimators.allocator.trace import load_allocator_trace, replay_trace

HERE = Path(__file__).resolve().parent
FOLDERS = (HERE.parent.parent / "shared/groundtruth/traces", HERE.parent / "tests/data/allocator_traces")


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else next(folder for folder in FOLDERS if folder.is_dir())
    exact = [report(path) for path in sorted(folder.glob("*.json.gz"))]
    print(f"{sum(exact)} of {len(exact)} traces reproduced to the byte")
    events = synthetic(1_000_000)
    started = time.perf_counter()
    outcome = replay(events, AllocatorSettings())
    print(
        f"1,000,000 events in {time.perf_counter() - started:.1f} s ({outcome.peak_reserved_bytes // MIB} MiB)"
    )
    return 0 if all(exact) and exact else 1


def report(path: Path) -> bool:
    trace = load_allocator_trace(path)
    result = replay_trace(trace)
    events = trace.from_empty()
    empty = replay(events, AllocatorSettings())
    recorded = result.recorded_peak_reserved_bytes
    print(
        f"{path.name[:44]:44} address {result.same_address}/{result.allocations}"
        f"  reserved {result.same_reserved}/{result.events}"
        f"  peak {recorded / MIB:.0f} = {result.peak_reserved_bytes / MIB:.0f}"
        f"  from empty {empty.peak_reserved_bytes / MIB:.0f} ({empty.peak_reserved_bytes / recorded - 1:+.1%})"
        f"  smallest {smallest_that_runs(events, AllocatorSettings()) / MIB:.0f}"
    )
    return (
        result.same_address == result.allocations
        and result.same_reserved == result.events
        and result.end_reserved_bytes == trace.end_reserved
        and result.end_allocated_bytes == trace.end_allocated
    )


def synthetic(count: int) -> AllocatorEvents:
    """Random sizes from 64 B to 64 MiB, about 4,000 live blocks: much more disorder than training makes."""
    rng = np.random.default_rng(0)
    sizes = (2 ** rng.uniform(6, 26, count)).astype(np.int64).tolist()
    picks = rng.random((count, 2)).tolist()
    live: list[int] = []
    rows: list[tuple[int, int]] = []
    for handle, (size, (choice, which)) in enumerate(zip(sizes, picks, strict=True)):
        if live and choice < len(live) / 8000:
            at = int(which * len(live))
            live[at], live[-1] = live[-1], live[at]
            rows.append((live.pop(), -1))
        else:
            rows.append((handle, size))
            live.append(handle)
    return AllocatorEvents.of(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
