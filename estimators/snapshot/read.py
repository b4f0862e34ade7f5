"""Reads PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot`) into plain columns, without running any code.

A snapshot holds, for each device, the events that the allocator recorded (`device_traces`) and the segments as they were when
it was written. What was there when the recording began is rebuilt by undoing the events from the end.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memopt.errors import BadFile
from memopt.estimators.snapshot.plain_pickle import load_plain
from memopt.files import read_bytes

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "snapshot", "oom", "other",
)  # fmt: skip
_ACTION_INDEX = {name: index for index, name in enumerate(ACTIONS)}
_MOST_DEVICES = 64
_MOST_NUMBER = 2**63 - 1
_MOST_TEXT = 500
_NO_FRAMES: list[object] = []
_AGAIN = "torch.cuda.memory._dump_snapshot('snapshot.pickle'), to write it again"


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """A block of a segment when the snapshot was written."""

    address: int
    size_bytes: int
    requested_bytes: int
    live: bool
    """Allocated, or freed but still used by a stream."""
    stack: int
    """Index into `Snapshot.stacks`."""


@dataclass(frozen=True, slots=True)
class SnapshotSegment:
    """A segment when the snapshot was written, with its blocks in order of address."""

    address: int
    size_bytes: int
    small: bool
    stream: int
    expandable: bool
    private_pool: bool
    """Of a CUDA graph or a MemPool: not the default pool."""
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True, slots=True)
class SnapshotDevice:
    """One device's events, as columns of one length, and its segments at the end."""

    index: int
    action: NDArray[np.int8]
    """Index into `ACTIONS`."""
    address: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    """As requested; for segments as taken."""
    stream: NDArray[np.int64]
    time_us: NDArray[np.int64]
    """0 where the recording has none (torch before 2.2)."""
    stack: NDArray[np.int64]
    """Index into `Snapshot.stacks`."""
    segments: tuple[SnapshotSegment, ...]

    def __len__(self) -> int:
        return len(self.action)

    @property
    def allocated_bytes(self) -> int:
        """Live blocks when the snapshot was written."""
        return sum(block.size_bytes for segment in self.segments for block in segment.blocks if block.live)

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def expandable(self) -> bool:
        maps = np.isin(self.action, [_ACTION_INDEX["segment_map"], _ACTION_INDEX["segment_unmap"]])
        return bool(maps.any()) or any(segment.expandable for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole snapshot: devices that hold or recorded something, the stacks, and the allocator's settings."""

    devices: tuple[SnapshotDevice, ...]
    stacks: tuple[str, ...]
    """`file:line function`, innermost first, joined by newlines; index 0 is the empty stack."""
    settings: dict[str, str]


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot at `path` (gzipped or not).

    Raises `BadFile` when it is not one, is truncated or inconsistent, or when its pickle names anything that could run.
    """
    name = str(path)
    data = load_plain(read_bytes(path, "memory snapshot"), name)
    return _Reader(name).snapshot(data)


class _Reader:
    """Checks each field as it takes it over; stacks are kept once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stacks: dict[str, int] = {"": 0}
        self.seen: dict[int, int] = {}
        """Stack index of each list of frames, by identity: events share them."""

    def snapshot(self, data: object) -> Snapshot:
        table = self._dict(data, "the snapshot")
        if "segments" not in table and "device_traces" not in table:
            raise self._bad("it has neither 'segments' nor 'device_traces'")
        traces = self._list(table.get("device_traces", []), "device_traces")
        segments = [self._dict(s, "a segment") for s in self._list(table.get("segments", []), "segments")]
        by_device: dict[int, list[dict[str, object]]] = {}
        for segment in segments:
            by_device.setdefault(self._number(segment, "device", 0), []).append(segment)
        if len(traces) > _MOST_DEVICES or not all(0 <= device < _MOST_DEVICES for device in by_device):
            raise self._bad(f"it has more than {_MOST_DEVICES} devices")
        devices = []
        for index in range(max([len(traces), *(device + 1 for device in by_device)])):
            trace = self._list(traces[index], "a device's events") if index < len(traces) else []
            if trace or index in by_device:
                devices.append(self._device(index, trace, by_device.get(index, [])))
        return Snapshot(tuple(devices), tuple(self.stacks), self._settings(table))

    def _device(self, index: int, trace: list[object], segments: list[dict[str, object]]) -> SnapshotDevice:
        events = np.array([self._event(event) for event in trace], dtype=np.int64).reshape(-1, 6).T
        read = tuple(sorted((self._segment(s) for s in self._apart(segments)), key=lambda s: s.address))
        return SnapshotDevice(
            index=index,
            action=events[0].astype(np.int8),
            address=events[1],
            size_bytes=events[2],
            stream=events[3],
            time_us=events[4],
            stack=events[5],
            segments=read,
        )

    def _event(self, event: object) -> tuple[int, int, int, int, int, int]:
        row = self._dict(event, "an event")
        action = _ACTION_INDEX.get(_text(row.get("action")), len(ACTIONS) - 1)
        return (
            action,
            self._number(row, "addr", 0),
            self._number(row, "size", 0),
            self._number(row, "stream", 0),
            self._number(row, "time_us", 0),
            self._stack(row.get("frames", _NO_FRAMES)),
        )

    def _apart(self, segments: list[dict[str, object]]) -> list[dict[str, object]]:
        """The segments, if no two of them overlap."""
        spans = sorted((self._number(s, "address"), self._number(s, "total_size")) for s in segments)
        for (address, size), (following, _) in itertools.pairwise(spans):
            if address + size > following:
                raise self._bad(f"two segments overlap at {following:#x}")
        return segments

    def _segment(self, row: dict[str, object]) -> SnapshotSegment:
        address, size = self._number(row, "address"), self._number(row, "total_size")
        blocks, at = [], address
        for entry in self._list(row.get("blocks", []), "blocks"):
            block = self._block(self._dict(entry, "a block"), at)
            if block.address < at or block.size_bytes <= 0:
                raise self._bad(f"blocks of the segment at {address:#x} overlap")
            at = block.address + block.size_bytes
            blocks.append(block)
        if at > address + size:
            raise self._bad(f"blocks of the segment at {address:#x} reach beyond it")
        return SnapshotSegment(
            address=address,
            size_bytes=size,
            small=row.get("segment_type") == "small",
            stream=self._number(row, "stream", 0),
            expandable=row.get("is_expandable") is True,
            private_pool=row.get("segment_pool_id", (0, 0)) != (0, 0),
            blocks=tuple(blocks),
        )

    def _block(self, row: dict[str, object], at: int) -> SnapshotBlock:
        size = self._number(row, "size")
        return SnapshotBlock(
            address=self._number(row, "address", at),  # not written before torch 2.1
            size_bytes=size,
            requested_bytes=self._number(row, "requested_size", size),
            live=_text(row.get("state")).startswith("active"),
            stack=self._stack(row.get("frames", _NO_FRAMES)),
        )

    def _stack(self, frames: object) -> int:
        if id(frames) in self.seen:
            return self.seen[id(frames)]
        lines = []
        for frame in self._list(frames, "frames"):
            row = self._dict(frame, "a frame")
            lines.append(f"{_text(row.get('filename'))}:{_text(row.get('line'))} {_text(row.get('name'))}")
        index = self.stacks.setdefault("\n".join(lines), len(self.stacks))
        self.seen[id(frames)] = index
        return index

    def _settings(self, table: dict[str, object]) -> dict[str, str]:
        settings = table.get("allocator_settings", {})
        return {_text(key): _text(value) for key, value in self._dict(settings, "allocator_settings").items()}

    def _number(self, row: dict[str, object], field: str, default: int | None = None) -> int:
        value = row.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_NUMBER:
            raise self._bad(f"'{field}' holds no number that an allocator has")
        return value

    def _dict(self, value: object, what: str) -> dict[str, object]:
        if type(value) is not dict:
            raise self._bad(f"{what} is a {type(value).__name__}, not a table")
        return value

    def _list(self, value: object, what: str) -> list[object]:
        if type(value) is not list:
            raise self._bad(f"{what} is a {type(value).__name__}, not a list")
        return value

    def _bad(self, why: str) -> BadFile:
        return BadFile(f"{self.name} is not a memory snapshot", why=why, try_=_AGAIN)


def _text(value: object) -> str:
    """`value` as short text if it is text or a number; a container could be without end."""
    return str(value)[:_MOST_TEXT] if isinstance(value, (str, int, float)) else ""
