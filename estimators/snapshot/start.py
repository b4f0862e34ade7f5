"""From a memory snapshot to a stream of allocator events that starts from a known layout.

A snapshot holds the layout at its end; undoing the recorded events from there gives the layout when the recording began.
Sizes of blocks that were live then and freed since are not recorded: they are the request, rounded, and in the large pool
whatever of up to 1 MiB lies between them and the next block, as the allocator does not cut so little off. Where more lies
behind, the part that was theirs shows later: the replay puts a block where they end, the recording a little further on.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

import msgspec

from memopt.errors import BadFile
from memopt.estimators.allocator.settings import (
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    round_request,
)
from memopt.estimators.allocator.trace import Action, AllocatorTrace, TraceReplayer
from memopt.estimators.snapshot.read import ACTIONS, SnapshotDevice

_KEPT: frozenset[str] = frozenset(
    ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom")
)

_MOST_REPAIRS = 100

Segment = tuple[int, int, Literal[0, 1], int, list[tuple[int, int]]]
"""As in `AllocatorTrace.init`."""


def allocator_trace(device: SnapshotDevice, settings: AllocatorSettings | None = None) -> AllocatorTrace:
    """The device's events, and the segments and live blocks when they began.

    Raises `BadFile` when the events contradict the segments at the end.
    """
    events = _events(device)
    undone = _Undone(device, settings or AllocatorSettings())
    for action, address, size_bytes, stream in reversed(events):
        undone.undo(action, address, size_bytes, stream)
    trace = AllocatorTrace(
        init=[] if device.expandable and undone.nothing_left() else undone.layout(),
        events=events,
        expandable=device.expandable,
        end_allocated=device.allocated_bytes,
        end_reserved=device.reserved_bytes,
    )
    return trace if trace.expandable else _with_hidden_remainders(trace, settings)


def _with_hidden_remainders(trace: AllocatorTrace, settings: AllocatorSettings | None) -> AllocatorTrace:
    """`trace` with the blocks of its start as large as the replay shows them to have been."""
    for _ in range(_MOST_REPAIRS):
        replayer = TraceReplayer(trace, settings)
        replayer.run(to_mismatch=True)
        found = _hidden_remainder(replayer, {address for *_, live in trace.init for address, _ in live})
        if found is None:
            return trace
        owner, more_bytes = found
        init = [
            (*segment, [(a, size + more_bytes if a == owner else size) for a, size in live])
            for *segment, live in trace.init
        ]
        trace = msgspec.structs.replace(trace, init=init)
    return trace


def _hidden_remainder(replayer: TraceReplayer, at_start: set[int]) -> tuple[int, int] | None:
    """A block of the start, and how much further it must have reached for the first mismatch to lie as recorded."""
    if replayer.mismatch is None:
        return None
    taken, address = replayer.mismatch
    for block in [taken, *replayer.allocator.blocks()]:
        before, further_bytes = block.prev, address - block.address
        fits = 0 < further_bytes <= SMALL_REQUEST_BYTES and further_bytes < block.size_bytes
        if fits and before is not None and before.allocated and before.address in at_start:
            return before.address, further_bytes
    return None


def _events(device: SnapshotDevice) -> list[tuple[Action, int, int, int]]:
    columns = (device.action, device.address, device.size_bytes, device.stream)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(ACTIONS[row[0]], *row[1:]) for row in rows if ACTIONS[row[0]] in _KEPT]


class _Undone:
    """Segments and live blocks at a moment that moves back in time."""

    def __init__(self, device: SnapshotDevice, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.segments: dict[int, tuple[int, bool | None, int]] = {}
        """Size, whether small (None: not known) and stream, by address."""
        self.live: dict[int, tuple[int, int | None]] = {}
        """Bytes asked for and, where known, the block's, by address."""
        self.mapped_bytes = device.reserved_bytes
        for segment in device.segments:
            self.segments[segment.address] = (segment.size_bytes, segment.small, segment.stream)
            for block in segment.blocks:
                if block.live:
                    self.live[block.address] = (block.requested_bytes, block.size_bytes)

    def undo(self, action: Action, address: int, size_bytes: int, stream: int) -> None:
        if action == "alloc" and size_bytes:
            if self.live.pop(address, None) is None:
                raise _contradiction(
                    f"the block allocated at {address:#x} is neither freed nor there at the end"
                )
        elif action == "free_completed":
            if address in self.live:
                raise _contradiction(f"the block freed at {address:#x} is still there")
            self.live[address] = (size_bytes, None)
        elif action == "segment_alloc":
            if self.segments.pop(address, None) is None:
                raise _contradiction(
                    f"the segment taken at {address:#x} is neither freed nor there at the end"
                )
        elif action == "segment_free":
            self.segments[address] = (size_bytes, None, stream)
        elif action == "segment_map":
            self.mapped_bytes -= size_bytes
        elif action == "segment_unmap":
            self.mapped_bytes += size_bytes

    def nothing_left(self) -> bool:
        return self.mapped_bytes == 0 and not self.live

    def layout(self) -> list[Segment]:
        starts = sorted(self.segments)
        inside: dict[int, list[int]] = {start: [] for start in starts}
        for address in sorted(self.live):
            index = bisect_right(starts, address) - 1
            if index < 0 or address >= starts[index] + self.segments[starts[index]][0]:
                raise _contradiction(f"the block at {address:#x} lies in no segment")
            inside[starts[index]].append(address)
        return [self._segment(start, inside[start]) for start in starts]

    def _segment(self, start: int, addresses: list[int]) -> Segment:
        size_bytes, small, stream = self.segments[start]
        if small is None:
            little = all(self._rounded(address) <= SMALL_REQUEST_BYTES for address in addresses)
            small = size_bytes == SMALL_SEGMENT_BYTES and little
        ends = [*addresses[1:], start + size_bytes][: len(addresses)]
        blocks = [
            (address, self._block_bytes(address, end, small))
            for address, end in zip(addresses, ends, strict=True)
        ]
        return (start, size_bytes, 0 if small else 1, stream, blocks)

    def _block_bytes(self, address: int, end: int, small: bool) -> int:
        known = self.live[address][1]
        size_bytes = known if known is not None else self._rounded(address)
        rest_bytes = end - address - size_bytes
        if rest_bytes < 0:
            raise _contradiction(f"the block at {address:#x} reaches into the next one")
        uncut = known is None and not small and rest_bytes <= SMALL_REQUEST_BYTES
        return size_bytes + rest_bytes if uncut else size_bytes

    def _rounded(self, address: int) -> int:
        return round_request(self.live[address][0], self.settings)


def _contradiction(why: str) -> BadFile:
    return BadFile(
        "this snapshot's events do not lead to its segments",
        why=why,
        try_="a snapshot written while recording was on",
    )
