"""Replay a sequence of allocations and frees through the simulated caching allocator, with or without a limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memopt.errors import MemoptError, NotPossibleHere
from memopt.estimators.allocator.caching import CachingAllocator, OutOfDeviceMemory
from memopt.estimators.allocator.settings import SEGMENT_STEP_BYTES, AllocatorSettings
from memopt.units import format_bytes

EMPTY_CACHE = -1
"""The handle of an event that stands for `torch.cuda.empty_cache()`; its bytes are 0."""


@dataclass(frozen=True, slots=True)
class AllocatorEvents:
    """Allocations and frees in order, as columns of one length.

    `size_bytes > 0` allocates under `handle`; `size_bytes < 0` frees what `handle` holds (the amount is not read);
    `size_bytes == 0` allocates nothing, and with the handle `EMPTY_CACHE` empties the cache. A handle may be used again
    once it was freed.
    """

    handle: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    stream: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.handle)

    @staticmethod
    def of(rows: list[tuple[int, int]] | list[tuple[int, int, int]]) -> AllocatorEvents:
        """Events from (handle, bytes) or (handle, bytes, stream) rows."""
        columns = np.array([(*row, 0)[:3] for row in rows], dtype=np.int64).reshape(-1, 3).T
        return AllocatorEvents(columns[0], columns[1], columns[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOutcome:
    """What a replay came to. When it ran out of memory the figures are those reached until then."""

    peak_requested_bytes: int
    """Largest sum of what was asked for."""
    peak_allocated_bytes: int
    """Largest sum of live blocks, as `torch.cuda.max_memory_allocated`."""
    peak_reserved_bytes: int
    """As `torch.cuda.max_memory_reserved`."""
    allocated_at_peak_reserved_bytes: int
    end_allocated_bytes: int
    end_reserved_bytes: int
    retries: int
    """How often everything cached had to be given back to serve a request."""
    out_of_memory_event: int | None = None
    """The event that could not be served; None when the whole sequence ran."""
    failed_request_bytes: int = 0
    reserved_bytes: NDArray[np.int64] | None = None
    """After every event, when a curve was asked for."""
    allocated_bytes: NDArray[np.int64] | None = None

    @property
    def ran(self) -> bool:
        return self.out_of_memory_event is None

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that was not allocated when most was reserved."""
        if self.peak_reserved_bytes == 0:
            return 0.0
        return 1 - self.allocated_at_peak_reserved_bytes / self.peak_reserved_bytes


def replay(
    events: AllocatorEvents,
    settings: AllocatorSettings,
    limit_bytes: int | None = None,
    *,
    device_bytes: int | None = None,
    curve: bool = False,
) -> AllocatorOutcome:
    """Run `events` through an empty allocator. `limit_bytes` is the process's share, `device_bytes` what the driver has."""
    allocator = CachingAllocator(settings, limit_bytes, device_bytes=device_bytes)
    return replay_on(allocator, events, curve=curve)


def replay_on(
    allocator: CachingAllocator, events: AllocatorEvents, *, curve: bool = False
) -> AllocatorOutcome:
    """As `replay`, on an allocator that may hold something already."""
    stats = allocator.stats
    malloc, free = allocator.malloc, allocator.free
    reserved: list[int] = []
    allocated: list[int] = []
    failed_event, failed_bytes = None, 0
    columns = zip(events.handle.tolist(), events.size_bytes.tolist(), events.stream.tolist(), strict=True)
    for position, (handle, size_bytes, stream) in enumerate(columns):
        try:
            if size_bytes > 0:
                malloc(handle, size_bytes, stream)
            elif size_bytes < 0:
                free(handle)
            elif handle == EMPTY_CACHE:
                allocator.empty_cache()
            else:
                malloc(handle, 0, stream)
        except OutOfDeviceMemory as failure:
            failed_event, failed_bytes = position, failure.requested_bytes
            break
        if curve:
            reserved.append(stats.reserved_bytes)
            allocated.append(stats.allocated_bytes)
    return _outcome(allocator, failed_event, failed_bytes, (reserved, allocated) if curve else None)


def _outcome(
    allocator: CachingAllocator,
    failed_event: int | None,
    failed_bytes: int,
    curves: tuple[list[int], list[int]] | None,
) -> AllocatorOutcome:
    stats = allocator.stats
    return AllocatorOutcome(
        peak_requested_bytes=stats.peak_requested_bytes,
        peak_allocated_bytes=stats.peak_allocated_bytes,
        peak_reserved_bytes=stats.peak_reserved_bytes,
        allocated_at_peak_reserved_bytes=stats.allocated_at_peak_reserved_bytes,
        end_allocated_bytes=stats.allocated_bytes,
        end_reserved_bytes=stats.reserved_bytes,
        retries=stats.retries,
        out_of_memory_event=failed_event,
        failed_request_bytes=failed_bytes,
        reserved_bytes=None if curves is None else np.array(curves[0], dtype=np.int64),
        allocated_bytes=None if curves is None else np.array(curves[1], dtype=np.int64),
    )


def smallest_that_runs(events: AllocatorEvents, settings: AllocatorSettings) -> int:
    """The smallest device memory, in steps of 2 MiB, on which `events` run, found by replays between bounds.

    On what is returned they did run, and one step below they do not. (With less memory the allocator frees at other moments,
    so that a much smaller size might run too, by luck: that is not searched for.)
    Raises `NotPossibleHere` when no size was found.
    """
    step = SEGMENT_STEP_BYTES
    free_run = replay(events, settings)
    high = -(-free_run.peak_reserved_bytes // step) * step
    while not _on_device(events, settings, high).ran:
        if high > 4 * free_run.peak_reserved_bytes:
            raise _never_runs(high)
        high += max(step, high // 16 // step * step)
    low = max((free_run.peak_requested_bytes - 1) // step * step, 0)
    while high - low > step:
        middle = (low + high) // 2 // step * step
        outcome = _on_device(events, settings, middle)
        if not outcome.ran:
            low = middle
        elif settings.collects:
            high = middle
        else:
            # On a device that holds just the peak it reached, the very same run is repeated.
            high = min(middle, outcome.peak_reserved_bytes)
    return high


def _on_device(events: AllocatorEvents, settings: AllocatorSettings, device_bytes: int) -> AllocatorOutcome:
    limit_bytes = device_bytes if settings.collects else None
    return replay(events, settings, limit_bytes, device_bytes=device_bytes)


def _never_runs(limit_bytes: int) -> MemoptError:
    return NotPossibleHere(
        "no limit was found under which these allocations run",
        why=f"they fail even with {format_bytes(limit_bytes)}",
        try_="a larger garbage_collection_threshold",
    )
