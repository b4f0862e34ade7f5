"""A recorded stream of a real caching allocator's events, and its replay against what was recorded.

Form (JSON, gzipped): `{"init": [[segment address, size, pool (0 small, 1 large), stream, [[block address, size], ...live]], ...],
"events": [[action, address, requested size, stream], ...], "expandable": bool, "end_allocated": bytes, "end_reserved": bytes}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from memopt.errors import BadFile
from memopt.estimators.allocator.blocks import Block
from memopt.estimators.allocator.caching import CachingAllocator
from memopt.estimators.allocator.replay import AllocatorEvents
from memopt.estimators.allocator.settings import AllocatorSettings
from memopt.files import read_bytes

Action = Literal[
    "segment_alloc", "segment_free", "segment_map", "segment_unmap", "alloc", "free_completed", "oom"
]


class AllocatorTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Events with addresses, and the segments that were there when the recording began."""

    init: list[tuple[int, int, Literal[0, 1], int, list[tuple[int, int]]]]
    events: list[tuple[Action, int, int, int]]
    expandable: bool
    end_allocated: int
    end_reserved: int

    def from_empty(self) -> AllocatorEvents:
        """The same allocations on an empty allocator: what was live at the start first, in order of address."""
        live = sorted((block, segment[3]) for segment in self.init for block in segment[4])
        rows = [(address, size, stream) for (address, size), stream in live]
        known = {address for (address, _), _ in live}
        for action, address, size, stream in self.events:
            if action == "alloc":
                rows.append((address, size, stream))
                known.add(address)
            elif action == "free_completed" and address in known:
                rows.append((address, -1, stream))
                known.remove(address)
        return AllocatorEvents.of(rows)


@dataclass(slots=True)
class TraceReplay:
    """How a replay compares with the recording, event by event."""

    allocations: int = 0
    same_address: int = 0
    events: int = 0
    same_reserved: int = 0
    peak_reserved_bytes: int = 0
    recorded_peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    end_reserved_bytes: int = 0
    end_allocated_bytes: int = 0


def load_allocator_trace(path: Path) -> AllocatorTrace:
    """The recorded events at `path`. Raises `BadFile` for anything else."""
    try:
        return msgspec.json.decode(read_bytes(path, "allocator trace"), type=AllocatorTrace)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"{path} is not an allocator trace", why=str(error) or "nested too deeply") from error


def replay_trace(trace: AllocatorTrace, settings: AllocatorSettings | None = None) -> TraceReplay:
    """Replay `trace` from its own start, new segments at the addresses that the driver gave, and compare as it goes.

    A `segment_free` in the recording is the allocator's own decision; the limit that made it is not recorded, so it is taken
    over: everything cached is given back at the first of a row of them.
    """
    if trace.expandable:
        raise BadFile(
            "this recording used expandable segments",
            why="its addresses depend on spans that it does not name",
        )
    try:
        return TraceReplayer(trace, settings).run()
    except ValueError as error:
        raise BadFile("this allocator trace contradicts itself", why=str(error)) from error


class TraceReplayer:
    """One replay; `mismatch` is what was allocated elsewhere than recorded, with the address recorded, the first time."""

    def __init__(self, trace: AllocatorTrace, settings: AllocatorSettings | None) -> None:
        self.trace = trace
        self.given: list[tuple[int, int]] = []
        self.allocator = CachingAllocator(settings, place=self._place)
        for address, size, pool, stream, live in trace.init:
            blocks = [(block, block, block_bytes) for block, block_bytes in live]
            self.allocator.adopt_segment(address, size, small=pool == 0, stream=stream, live=blocks)
        self.recorded_bytes = self.allocator.stats.reserved_bytes
        self.result = TraceReplay(recorded_peak_reserved_bytes=self.recorded_bytes)
        self.mismatch: tuple[Block, int] | None = None
        self._own_address = 1 << 50

    def run(self, *, to_mismatch: bool = False) -> TraceReplay:
        """Replay all events, or up to the first that comes to lie elsewhere."""
        result, stats = self.result, self.allocator.stats
        releasing = False
        for action, address, size, stream in self.trace.events:
            if action == "segment_free" and not releasing:
                self.allocator.empty_cache()
            releasing = action == "segment_free"
            self._step(action, address, size, stream)
            if to_mismatch and self.mismatch is not None:
                break
            result.recorded_peak_reserved_bytes = max(
                result.recorded_peak_reserved_bytes, self.recorded_bytes
            )
            if self.given or releasing:
                continue  # in the middle of what the allocator does in one go
            result.events += 1
            result.same_reserved += stats.reserved_bytes == self.recorded_bytes
        result.peak_reserved_bytes = stats.peak_reserved_bytes
        result.peak_allocated_bytes = stats.peak_allocated_bytes
        result.end_reserved_bytes = stats.reserved_bytes
        result.end_allocated_bytes = stats.allocated_bytes
        return result

    def _step(self, action: Action, address: int, size: int, stream: int) -> None:
        if action == "segment_alloc":
            self.given.append((address, size))
            self.recorded_bytes += size
        elif action == "segment_free":
            self.recorded_bytes -= size
        elif action == "alloc" and size:
            block = self.allocator.malloc(address, size, stream)
            self.result.allocations += 1
            same = block is not None and block.address == address
            self.result.same_address += same
            if block is not None and not same and self.mismatch is None:
                self.mismatch = (block, address)
            self.given.clear()
        elif action == "free_completed" and address in self.allocator.live:
            self.allocator.free(address)

    def _place(self, size_bytes: int) -> int:
        """The address that the driver gave for a segment of this size; one far from all real ones when it gave none."""
        for address, size in self.given:
            if size == size_bytes:
                return address
        self._own_address += 1 << 44
        return self._own_address
