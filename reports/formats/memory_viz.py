"""A run as a memory snapshot of PyTorch's, which `python -m torch.cuda._memory_viz` and the page at pytorch.org/memory_viz open.

The profile knows storages, not addresses: each gets the lowest place that is free for it when it is born (first fit, in blocks of 512
bytes, one segment). So the timeline is the recorded one, and the segment view shows a tidy allocator's packing, not the one that was there.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from collections import defaultdict
from typing import Any

from memopt.estimators.allocator.settings import MIN_BLOCK_BYTES
from memopt.reports.text import shown
from memopt.trace import CATEGORIES, Trace

_BASE = 1 << 33

Entry = dict[str, Any]


class _Places:
    """Addresses, first fit: gaps are kept in order of address, and neighbours are joined."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []
        self.end = 0

    def take(self, size: int) -> int:
        for place, (start, length) in enumerate(self._gaps):
            if length >= size:
                del self._gaps[place]
                if length > size:
                    insort(self._gaps, (start + size, length - size))
                return start
        start, self.end = self.end, self.end + size
        return start

    def give_back(self, start: int, size: int) -> None:
        place = bisect_left(self._gaps, (start, 0))
        if place < len(self._gaps) and self._gaps[place][0] == start + size:
            size += self._gaps.pop(place)[1]
        if place > 0 and sum(self._gaps[place - 1]) == start:
            start, before = self._gaps.pop(place - 1)
            size += before
        insort(self._gaps, (start, size))


def memory_viz(trace: Trace, *, with_source: bool = True) -> bytes:
    """The pickle, of plain data only; without source, no line of the script is in it."""
    storages, n = trace.storages, trace.op_count
    born: dict[int, list[int]] = defaultdict(list)
    died: dict[int, list[int]] = defaultdict(list)
    for storage in range(trace.storage_count):
        if storages.size_bytes[storage] and storages.death_op[storage] >= storages.birth_op[storage]:
            born[storages.birth_op[storage]].append(storage)
            if storages.death_op[storage] < n:
                died[max(storages.death_op[storage], 0)].append(storage)
    places, at, events = _Places(), dict[int, int](), list[Entry]()
    start_us = _starts_us(trace)
    for op in range(-1, n):
        for storage in born[op]:
            at[storage] = places.take(_rounded(storages.size_bytes[storage]))
            if op >= 0:
                events.append(_event("alloc", trace, storage, at[storage], start_us[op], with_source))
        for storage in died[op]:
            address = at.pop(storage)
            places.give_back(address, _rounded(storages.size_bytes[storage]))
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, trace, storage, address, start_us[op], with_source))
    snapshot = {"segments": [_segment(trace, at, places.end, with_source)], "device_traces": [events]}
    return pickle.dumps(snapshot, protocol=4)


def _starts_us(trace: Trace) -> list[int]:
    from memopt.estimators.simulator.trace_view import TraceView

    return [int(1000 * start) for start in TraceView(trace).start_ms.tolist()]


def _rounded(size: int) -> int:
    return -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def _frames(trace: Trace, storage: int, with_source: bool) -> list[Entry]:
    nearest = trace.strings[trace.storages.line[storage]].partition(", from ")[
        0
    ]  # of a library's and the user's
    file, _, number = nearest.rpartition(":")
    known = with_source and number.isdecimal()
    return [
        {
            "name": shown(trace.storage_label(storage)),
            "filename": shown(file) if known else "",
            "line": int(number) if known else 0,
        }
    ]


def _event(action: str, trace: Trace, storage: int, address: int, time_us: int, with_source: bool) -> Entry:
    return {
        "action": action,
        "addr": _BASE + address,
        "size": trace.storages.size_bytes[storage],
        "stream": 0,
        "time_us": time_us,
        "frames": _frames(trace, storage, with_source),
        "category": CATEGORIES[trace.storages.category[storage]].replace(" ", "_"),
    }


def _segment(trace: Trace, at: dict[int, int], end: int, with_source: bool) -> Entry:
    """The one segment, as it is when the iteration has ended."""
    blocks: list[Entry] = []
    reached = 0
    for storage, address in sorted(at.items(), key=lambda each: each[1]):
        size = trace.storages.size_bytes[storage]
        if address > reached:
            blocks.append(_free(reached, address - reached))
        blocks.append(
            {
                "address": _BASE + address,
                "size": _rounded(size),
                "requested_size": size,
                "state": "active_allocated",
                "frames": _frames(trace, storage, with_source),
            }
        )
        reached = address + _rounded(size)
    if end > reached:
        blocks.append(_free(reached, end - reached))
    held = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    asked = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": _BASE,
        "total_size": end,
        "allocated_size": held,
        "active_size": held,
        "requested_size": asked,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _free(start: int, size: int) -> Entry:
    return {
        "address": _BASE + start,
        "size": size,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }
