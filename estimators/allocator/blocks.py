"""Blocks, and the free lists that the caching allocator searches: one for each (pool, stream), best fit first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from memopt.estimators.allocator.settings import AllocatorSettings


class ExpandableSegment:
    """A span of addresses into which pages are mapped as they are needed."""

    __slots__ = ("address", "page_bytes", "size_bytes")

    def __init__(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.page_bytes = page_bytes

    def pages_up(self, address: int) -> int:
        """The first page boundary at or above `address`."""
        return self.address - (self.address - address) // self.page_bytes * self.page_bytes

    def pages_down(self, address: int) -> int:
        return self.address + (address - self.address) // self.page_bytes * self.page_bytes


class Block:
    """A piece of a segment: live, free, or (in an expandable segment) not mapped."""

    __slots__ = (
        "address", "allocated", "expandable", "free_since", "mapped", "next", "pool", "prev", "requested_bytes",
        "size_bytes",
    )  # fmt: skip

    def __init__(
        self,
        pool: FreeList,
        address: int,
        size_bytes: int,
        expandable: ExpandableSegment | None = None,
        *,
        mapped: bool = True,
    ) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.expandable = expandable
        self.mapped = mapped
        self.allocated = False
        self.requested_bytes = 0
        self.free_since = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    def whole_segment(self) -> bool:
        return self.prev is None and self.next is None

    def room_bytes(self) -> int:
        """Its size, and that of the unmapped span into which it could grow."""
        after = self.next
        return self.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)

    def insert_after(self, other: Block) -> None:
        """Put this block right behind `other` in its segment."""
        self.prev, self.next = other, other.next
        if other.next is not None:
            other.next.prev = self
        other.next = self


class FreeList:
    """Free blocks of one pool on one stream, in order of (size, address); and the unmapped ones, by address."""

    __slots__ = ("blocks", "keys", "small", "split_from_bytes", "split_up_to_bytes", "stream", "unmapped")

    def __init__(self, *, small: bool, stream: int, split_from_bytes: int, split_up_to_bytes: int) -> None:
        self.small = small
        self.stream = stream
        self.split_from_bytes = split_from_bytes
        """The least remainder that is cut off a block."""
        self.split_up_to_bytes = split_up_to_bytes
        """Requests of this size or more never cut a block."""
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[tuple[int, Block]] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Block]:
        """The free blocks, smallest first, as they are now."""
        return iter([self.blocks[key] for key in self.keys])

    def insert(self, block: Block) -> None:
        key = block.size_bytes << 64 | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = block.size_bytes << 64 | block.address
        del self.blocks[key]
        del self.keys[bisect_left(self.keys, key)]

    def first_at_least(self, size_bytes: int) -> int:
        """Index of the smallest block that holds `size_bytes`; the length of the list when none does."""
        return bisect_left(self.keys, size_bytes << 64)

    def at(self, index: int) -> Block:
        return self.blocks[self.keys[index]]

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        index = bisect_left(self.unmapped, block.address, key=lambda entry: entry[0])
        del self.unmapped[index]


class Stats(Protocol):
    """Of the counts that an allocator keeps, the one that growing looks at."""

    reserved_bytes: int


class Allocator(Protocol):
    """`caching.CachingAllocator`, to what takes memory from the driver for it and gives it back."""

    settings: AllocatorSettings
    limit_bytes: int | None
    device_bytes: int | None
    segments: dict[int, int]
    expandables: list[ExpandableSegment]
    searches: list[int]

    @property
    def stats(self) -> Stats: ...

    def free_lists(self) -> list[FreeList]: ...

    def cache(self, block: Block) -> None: ...

    def merge_neighbours(self, block: Block) -> None: ...

    def grew(self, size_bytes: int) -> None: ...

    def reserve_addresses(self, size_bytes: int) -> int: ...

    def expandable_bytes(self) -> int: ...
