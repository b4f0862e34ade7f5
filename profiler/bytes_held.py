"""Bytes on the device when each op starts and at most until it ends, from the allocator's events and from the storages.

The two see different things: the allocator sees workspaces and hidden tensors, the storages see memory that came from
elsewhere (numpy, a mapped file, shared memory). No op holds less than the storages that are alive while it runs.
"""

from __future__ import annotations

from itertools import accumulate

from memopt.profiler.recorder import Recorder
from memopt.profiler.timing.clock import Usage


def bytes_per_op(recorder: Recorder, usage: Usage | None, base_bytes: int) -> tuple[list[int], list[int]]:
    """(bytes when the op starts, the most from there to its end) for each op. Without `usage` the storages alone count."""
    starts, during = _storages_alive(recorder)
    seen = _allocated(usage, len(recorder.ops), inside=recorder.sends_away)
    if seen is None:
        return starts, [max(pair) for pair in zip(starts, during, strict=True)]
    live, high = [], []
    for op, (held, most) in enumerate(zip(*seen, strict=True)):
        begin = max(starts[op], base_bytes + held)
        live.append(begin)
        high.append(max(begin + max(0, most - held - recorder.added_in_place.get(op, 0)), during[op]))
    return live, high


def _allocated(usage: Usage | None, count: int, *, inside: bool) -> tuple[list[int], list[int]] | None:
    """The clock's columns; one that an exception cut off inside the last op is mended, others are not used."""
    if usage is None:
        return None
    live, high = usage.live_bytes, usage.inside_bytes if inside else usage.high_bytes
    if len(live) == count == len(high) + 1:
        high = [*high, max(live[-1], usage.high_after_bytes)]
    return (live, high) if len(live) == count == len(high) else None


def _storages_alive(recorder: Recorder) -> tuple[list[int], list[int]]:
    """Bytes of the storages that are alive when each op starts, and of those alive at any time while it runs."""
    count = len(recorder.ops)
    starts, during = [0] * (count + 1), [0] * (count + 1)
    for row in recorder.storages:
        first = min(row.birth if row.found or row.birth < 0 else row.birth + 1, count)
        end = count if row.death is None else min(row.death + 1, count)
        for changes, begin in ((starts, max(first, 0)), (during, max(min(row.birth, count), 0))):
            if begin < end:
                changes[begin] += row.size_bytes
                changes[end] -= row.size_bytes
    return list(accumulate(starts))[:count], list(accumulate(during))[:count]
