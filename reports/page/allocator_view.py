"""How a caching allocator's memory lies: segments, the tensors in them, what rounding takes, what is free between them.

A snapshot of torch's says it (as it was when the snapshot was written); of a profile made on a GPU it is what memopt's model of the
allocator comes to at the peak, on the second of two iterations, so that the cache is warm.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from memopt.errors import MemoptError
from memopt.estimators.allocator.blocks import Block
from memopt.estimators.allocator.caching import CachingAllocator
from memopt.estimators.allocator.settings import AllocatorSettings, parse_settings
from memopt.estimators.snapshot.read import SnapshotDevice, SnapshotSegment
from memopt.reports.page.moment import peak_op
from memopt.trace import CATEGORIES, Trace

ROUNDING, FREE = "rounding", "free"
_MOST_EVENTS = 400_000


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a segment: a tensor, what was added to it by rounding, or nothing."""

    size_bytes: int
    kind: str
    """One of `CATEGORIES`, `rounding` or `free`."""
    label: str = ""
    storage: int = -1


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of memory that the allocator took from the driver."""

    size_bytes: int
    small: bool
    """Of the pool for requests up to 1 MiB."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class AllocatorView:
    """All segments at one moment, those that hold most first."""

    when: str
    """`when the snapshot was written`."""
    modelled: bool
    segments: tuple[Segment, ...]

    def total_bytes(self, *kinds: str) -> int:
        """Bytes of the pieces of these kinds; of all without any."""
        return sum(each.size_bytes for each in self.pieces() if not kinds or each.kind in kinds)

    def pieces(self) -> Iterator[Piece]:
        return chain.from_iterable(segment.pieces for segment in self.segments)

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory in which no tensor lies."""
        whole = self.total_bytes()
        return self.total_bytes(FREE, ROUNDING) / whole if whole else 0.0

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that needs no new segment."""
        return max((each.size_bytes for each in self.pieces() if each.kind == FREE), default=0)


def of_snapshot(device: SnapshotDevice, trace: Trace, storage_at: dict[int, int]) -> AllocatorView | None:
    """The segments of `device` as the snapshot has them; `storage_at`: address -> storage of `trace`. None where it has none."""
    if not device.segments:
        return None
    found = [
        Segment(
            size_bytes=each.size_bytes, small=each.small, pieces=tuple(_recorded(each, trace, storage_at))
        )
        for each in device.segments
    ]
    return AllocatorView("when the snapshot was written", modelled=False, segments=_sorted(found))


def _recorded(segment: SnapshotSegment, trace: Trace, storage_at: dict[int, int]) -> Iterator[Piece]:
    for block in segment.blocks:
        if not block.live:
            yield Piece(block.size_bytes, FREE)
            continue
        asked = min(block.requested_bytes or block.size_bytes, block.size_bytes)
        yield _tensor(trace, storage_at.get(block.address, -1), asked)
        if asked < block.size_bytes:
            yield Piece(block.size_bytes - asked, ROUNDING)


def _tensor(trace: Trace, storage: int, size_bytes: int) -> Piece:
    if storage < 0:
        return Piece(size_bytes, "temporary", "a tensor that the recording does not name")
    kind = CATEGORIES[trace.storages.category[storage]]
    return Piece(size_bytes, kind, trace.storage_label(storage), storage)


def at_the_peak(trace: Trace) -> AllocatorView | None:
    """Where the model of PyTorch's CUDA allocator puts the tensors of `trace` at its peak; None where no such allocator was at work."""
    events = 4 * trace.storage_count
    if trace.device.kind != "cuda" or trace.partial or not trace.op_count or events > _MOST_EVENTS:
        return None
    try:
        settings = parse_settings(trace.device.allocator.removeprefix("native"))
    except MemoptError:  # another allocator's words
        return None
    allocator = _filled(trace, settings)
    blocks = sorted(set(allocator.blocks()), key=lambda block: block.address)
    segments = sorted([*allocator.segments, *(each.address for each in allocator.expandables)])
    owner = {id(block): handle for handle, block in allocator.live.items() if block is not None}
    rows: list[list[Block]] = [[] for _ in segments]
    for block in blocks:
        if block.mapped:
            rows[bisect_right(segments, block.address) - 1].append(block)
    found = [
        Segment(
            size_bytes=sum(block.size_bytes for block in row),
            small=row[0].pool.small,
            pieces=tuple(chain.from_iterable(_modelled(block, trace, owner) for block in row)),
        )
        for row in rows
        if row
    ]
    return AllocatorView("at the peak", modelled=True, segments=_sorted(found))


def _modelled(block: Block, trace: Trace, owner: dict[int, int]) -> Iterator[Piece]:
    storage = owner.get(id(block), -1)
    if storage < 0:
        yield Piece(block.size_bytes, FREE)
        return
    yield _tensor(trace, storage, block.requested_bytes)
    if block.requested_bytes < block.size_bytes:
        yield Piece(block.size_bytes - block.requested_bytes, ROUNDING)


def _filled(trace: Trace, settings: AllocatorSettings) -> CachingAllocator:
    """An allocator in which one iteration has run, and the next up to the op of the peak; handles are storages."""
    allocator, storages = CachingAllocator(settings), trace.storages
    born: list[list[int]] = [[] for _ in range(trace.op_count)]
    dying: list[list[int]] = [[] for _ in range(trace.op_count)]
    stays = []
    for storage, (birth, death) in enumerate(zip(storages.birth_op, storages.death_op, strict=True)):
        if not storages.size_bytes[storage]:
            continue
        if birth < 0:
            allocator.malloc(storage, storages.size_bytes[storage])
        else:
            born[birth].append(storage)
        if death < trace.op_count:
            dying[max(death, 0)].append(storage)
        elif birth >= 0:
            stays.append(storage)
    for last in (trace.op_count, peak_op(trace) + 1):
        for op in range(last):
            for storage in born[op]:
                allocator.malloc(storage, storages.size_bytes[storage])
            if op + 1 < last or last == trace.op_count:
                for storage in dying[op]:
                    allocator.free(storage)
        if last == trace.op_count:
            _begin_again(allocator, trace, stays)
    return allocator


def _begin_again(allocator: CachingAllocator, trace: Trace, stays: list[int]) -> None:
    """What the iteration left takes the place of what it found: the same tensors are there at the start of each."""
    for storage in stays:
        allocator.free(storage)
    for storage, birth in enumerate(trace.storages.birth_op):
        size = trace.storages.size_bytes[storage]
        if birth < 0 and size and storage not in allocator.live:
            allocator.malloc(storage, size)


def _sorted(segments: list[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=lambda each: (each.small, -each.size_bytes)))
