"""The native CUDA caching allocator, simulated: where each block lies, and what is reserved for it.

Rules: `c10/cuda/CUDACachingAllocator.cpp`, torch 2.9 to 2.13; checked on recorded traces (torch 2.1 to 2.11) to the byte.
A request is rounded, looked up in the free list of its (pool, stream) by best fit, ties by lowest address; on a miss a
segment is taken from the driver; at the limit cached segments are given back first. A freed block merges with its free
neighbours and stays cached. What counts as allocated is the block, not the request.

Not simulated: `recordStream` (give the time at which the free completed), private pools of CUDA graphs, the driver's
choice of addresses (segments get rising ones unless `place` says otherwise; only ties depend on it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memopt.estimators.allocator.blocks import Block, ExpandableSegment, FreeList
from memopt.estimators.allocator.expandable import grow_expandable
from memopt.estimators.allocator.release import collect_garbage, release_cached, release_oversize
from memopt.estimators.allocator.settings import (
    MIN_BLOCK_BYTES,
    SEGMENT_STEP_BYTES,
    SMALL_REQUEST_BYTES,
    AllocatorSettings,
    round_request,
    segment_bytes,
)

_VIRTUAL_BYTES = 1 << 43
"""Addresses of an expandable segment on a device of unknown size."""


class OutOfDeviceMemory(Exception):
    """A request that the limit does not allow, even after everything cached was given back."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes asked, {allocated_bytes} live, {reserved_bytes} reserved")
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(slots=True)
class AllocatorStats:
    """What `torch.cuda.memory_stats` would say, and what was allocated when most was reserved."""

    requested_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    allocated_at_peak_reserved_bytes: int = 0
    segments_taken: int = 0
    segments_freed: int = 0
    retries: int = 0


class CachingAllocator:
    """One device's caching allocator. `limit_bytes` is what `set_per_process_memory_fraction` would allow it to reserve.

    `device_bytes` is what the driver has to give (no limit when None); `place` gives each new segment's address from its size.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        limit_bytes: int | None = None,
        *,
        device_bytes: int | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.limit_bytes = limit_bytes
        self.device_bytes = device_bytes
        self.stats = AllocatorStats()
        self.segments: dict[int, int] = {}
        """Size of each segment that is not expandable, by address."""
        self.expandables: list[ExpandableSegment] = []
        self.live: dict[int, Block | None] = {}
        """Block of each live handle; None for a request of no bytes."""
        self.searches = [0, 0]
        """How often a block was looked for in the large and the small pool: the clock of the garbage collector."""
        self._place = place
        self._next_address = SEGMENT_STEP_BYTES
        self._lists: dict[tuple[bool, int], FreeList] = {}
        self._rounded: dict[int, int] = {}
        self._collects = limit_bytes is not None and self.settings.garbage_collection_threshold > 0

    def malloc(self, handle: int, size_bytes: int, stream: int = 0) -> Block | None:
        """Allocate `size_bytes` on `stream` under `handle`; None when nothing was asked.

        Raises `OutOfDeviceMemory` where PyTorch would, `ValueError` for a handle in use or a negative size.
        """
        if handle in self.live or size_bytes < 0:
            raise ValueError(f"handle {handle} is in use, or {size_bytes} bytes are negative")
        if size_bytes == 0:
            self.live[handle] = None
            return None
        rounded_bytes = self._rounded.get(size_bytes) or self._round(size_bytes)
        small = rounded_bytes <= SMALL_REQUEST_BYTES
        pool = self._lists.get((small, stream)) or self.free_list(small, stream)
        block = self._take(pool, rounded_bytes) or self._grow(pool, rounded_bytes, size_bytes)
        if (
            block.size_bytes - rounded_bytes >= pool.split_from_bytes
            and rounded_bytes < pool.split_up_to_bytes
        ):
            block = self._split(block, rounded_bytes)
        block.allocated = True
        block.requested_bytes = size_bytes
        self.live[handle] = block
        self._count(block.size_bytes, size_bytes)
        return block

    def free(self, handle: int) -> None:
        """Give back what `handle` holds. Raises `ValueError` when it holds nothing."""
        try:
            block = self.live.pop(handle)
        except KeyError:
            raise ValueError(f"handle {handle} is not live") from None
        if block is None:
            return
        block.allocated = False
        self.stats.allocated_bytes -= block.size_bytes
        self.stats.requested_bytes -= block.requested_bytes
        self.merge_neighbours(block)
        self.cache(block)

    def empty_cache(self) -> None:
        """Give every segment (expandable: every page) that holds nothing back to the driver."""
        release_cached(self)

    def adopt_segment(
        self, address: int, size_bytes: int, *, small: bool, stream: int, live: list[tuple[int, int, int]]
    ) -> None:
        """Take over a segment as it was found, with its live blocks (handle, address, block size) in order of address."""
        pool = self.free_list(small, stream)
        previous: Block | None = None
        position = address
        for handle, block_address, block_bytes in [*live, (-1, address + size_bytes, 0)]:
            if block_address < position:
                raise ValueError(f"blocks overlap at {block_address:#x}")
            if block_address > position:
                previous = self._append(pool, previous, position, block_address - position)
                self.cache(previous)
            if block_bytes:
                previous = self._append(pool, previous, block_address, block_bytes)
                previous.allocated, previous.requested_bytes = True, block_bytes
                self.live[handle] = previous
                self.stats.allocated_bytes += block_bytes
                self.stats.requested_bytes += block_bytes
            position = block_address + block_bytes
        self.segments[address] = size_bytes
        self.grew(size_bytes)
        self._count(0, 0)

    def blocks(self) -> Iterator[Block]:
        """Every mapped block, free or live, in no order: what a checker walks."""
        for pool in self._lists.values():
            yield from pool
        for block in self.live.values():
            if block is not None:
                yield block

    def free_lists(self) -> list[FreeList]:
        """The free lists, large pools first, as PyTorch releases them."""
        return sorted(self._lists.values(), key=lambda pool: (pool.small, pool.stream))

    def free_list(self, small: bool, stream: int) -> FreeList:
        key = (small, stream)
        if key not in self._lists:
            fine = small or self.settings.expandable_segments
            self._lists[key] = FreeList(
                small=small,
                stream=stream,
                split_from_bytes=MIN_BLOCK_BYTES if fine else SMALL_REQUEST_BYTES + 1,
                split_up_to_bytes=1 << 62 if fine else self.settings.max_split_size_bytes,
            )
        return self._lists[key]

    def cache(self, block: Block) -> None:
        block.free_since = self.searches[block.pool.small]
        block.pool.insert(block)

    def merge_neighbours(self, block: Block) -> None:
        """Join `block` with the neighbours that are free and mapped as it is; it must be in no list itself."""
        before = block.prev
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self._unlist(before)
            block.address = before.address
            block.size_bytes += before.size_bytes
            block.prev = before.prev
            if block.prev is not None:
                block.prev.next = block
        after = block.next
        if after is not None and not after.allocated and after.mapped == block.mapped:
            self._unlist(after)
            block.size_bytes += after.size_bytes
            block.next = after.next
            if block.next is not None:
                block.next.prev = block

    def grew(self, size_bytes: int) -> None:
        """Count `size_bytes` more (or less) as reserved."""
        stats = self.stats
        stats.reserved_bytes += size_bytes
        if size_bytes > 0:
            stats.segments_taken += 1
        else:
            stats.segments_freed += 1
        if stats.reserved_bytes > stats.peak_reserved_bytes:
            stats.peak_reserved_bytes = stats.reserved_bytes
            stats.allocated_at_peak_reserved_bytes = 0

    def reserve_addresses(self, size_bytes: int) -> int:
        """The address of a new segment."""
        if self._place is not None:
            return self._place(size_bytes)
        address = self._next_address
        self._next_address += -(-size_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        return address

    def expandable_bytes(self) -> int:
        """How many addresses an expandable segment spans: 1.125 times the device's memory."""
        return self.device_bytes + self.device_bytes // 8 if self.device_bytes else _VIRTUAL_BYTES

    def _unlist(self, block: Block) -> None:
        if block.mapped:
            block.pool.remove(block)
        else:
            block.pool.remove_unmapped(block)

    def _append(self, pool: FreeList, previous: Block | None, address: int, size_bytes: int) -> Block:
        block = Block(pool, address, size_bytes)
        if previous is not None:
            block.insert_after(previous)
        return block

    def _count(self, block_bytes: int, size_bytes: int) -> None:
        stats = self.stats
        allocated = stats.allocated_bytes = stats.allocated_bytes + block_bytes
        requested = stats.requested_bytes = stats.requested_bytes + size_bytes
        if allocated > stats.peak_allocated_bytes:
            stats.peak_allocated_bytes = allocated
        if requested > stats.peak_requested_bytes:
            stats.peak_requested_bytes = requested
        if (
            stats.reserved_bytes == stats.peak_reserved_bytes
            and allocated > stats.allocated_at_peak_reserved_bytes
        ):
            stats.allocated_at_peak_reserved_bytes = allocated

    def _round(self, size_bytes: int) -> int:
        rounded = self._rounded[size_bytes] = round_request(size_bytes, self.settings)
        return rounded

    def _take(self, pool: FreeList, size_bytes: int) -> Block | None:
        """The best fitting free block, out of its list; None when there is none that may serve."""
        if self._collects:
            self.searches[pool.small] += 1
        index = pool.first_at_least(size_bytes)
        keys = pool.keys
        if index == len(keys):
            return None
        block = pool.blocks[keys[index]]
        if block.expandable is not None:
            # A block at the mapped end counts as large as it could grow: a later one without such room is a better fit.
            while index + 1 < len(keys) and pool.at(index + 1).room_bytes() < block.room_bytes():
                index += 1
                block = pool.at(index)
        most_bytes = self.settings.max_split_size_bytes
        if size_bytes < most_bytes:
            if block.size_bytes >= most_bytes:
                return None
        elif block.size_bytes >= size_bytes + self.settings.max_non_split_rounding_bytes:
            return None
        del pool.blocks[keys[index]]
        del keys[index]
        return block

    def _grow(self, pool: FreeList, size_bytes: int, requested_bytes: int) -> Block:
        """A free block of at least `size_bytes` from the driver, after giving cached memory back if need be."""
        if self._collects:
            collect_garbage(self)
        block = self._from_driver(pool, size_bytes)
        if block is None and release_oversize(self, pool, size_bytes):
            block = self._from_driver(pool, size_bytes)
        if block is None:
            release_cached(self)
            self.stats.retries += 1
            block = self._from_driver(pool, size_bytes)
        if block is None:
            raise OutOfDeviceMemory(requested_bytes, self.stats.allocated_bytes, self.stats.reserved_bytes)
        return block

    def _from_driver(self, pool: FreeList, size_bytes: int) -> Block | None:
        segment = segment_bytes(size_bytes, self.settings)
        if self.limit_bytes is not None and self.stats.reserved_bytes + segment > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return grow_expandable(self, pool, size_bytes)
        if self.device_bytes is not None and self.stats.reserved_bytes + segment > self.device_bytes:
            return None
        address = self.reserve_addresses(segment)
        self.segments[address] = segment
        self.grew(segment)
        return Block(pool, address, segment)

    def _split(self, block: Block, size_bytes: int) -> Block:
        """The first `size_bytes` of `block` as a block of its own; the rest is cached."""
        left = Block(block.pool, block.address, size_bytes, block.expandable)
        left.prev, left.next = block.prev, block
        if left.prev is not None:
            left.prev.next = left
        block.prev = left
        block.address += size_bytes
        block.size_bytes -= size_bytes
        self.cache(block)
        return left
