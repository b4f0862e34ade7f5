"""Expandable segments: pages are mapped behind the last live block as needed, and unmapped at the limit."""

from __future__ import annotations

from memopt.estimators.allocator.blocks import Allocator, Block, ExpandableSegment, FreeList
from memopt.estimators.allocator.settings import SMALL_SEGMENT_BYTES


def grow_expandable(allocator: Allocator, pool: FreeList, size_bytes: int) -> Block | None:
    """A free block of at least `size_bytes`, in no list, from mapped and newly mapped pages; None when the driver has none.

    Pages that were mapped before the driver ran out stay mapped and cached, as in PyTorch.
    """
    candidate = _find(allocator, pool, size_bytes)
    if not candidate.mapped and not _map(allocator, candidate, min(candidate.size_bytes, size_bytes)):
        return None
    while candidate.size_bytes < size_bytes:
        unmapped = candidate.next
        assert unmapped is not None, "the span was found to be large enough"
        if not _map(allocator, unmapped, min(size_bytes - candidate.size_bytes, unmapped.size_bytes)):
            return None
        candidate = unmapped
    pool.remove(candidate)
    return candidate


def unmap_free_pages(allocator: Allocator, block: Block) -> None:
    """Give the whole pages inside the free `block` back; what is left of it at either end stays cached."""
    segment, pool = block.expandable, block.pool
    assert segment is not None
    start, end = segment.pages_up(block.address), segment.pages_down(block.address + block.size_bytes)
    if start >= end:
        return
    pool.remove(block)
    before_bytes, after_bytes = start - block.address, block.address + block.size_bytes - end
    if after_bytes:
        after = Block(pool, end, after_bytes, segment)
        after.insert_after(block)
        allocator.cache(after)
    if before_bytes:
        before = Block(pool, block.address, before_bytes, segment)
        before.prev, before.next = block.prev, block
        if block.prev is not None:
            block.prev.next = before
        block.prev = before
        allocator.cache(before)
    block.address, block.size_bytes, block.mapped = start, end - start, False
    allocator.merge_neighbours(block)
    pool.insert_unmapped(block)
    allocator.grew(start - end)


def _find(allocator: Allocator, pool: FreeList, size_bytes: int) -> Block:
    """The lowest unmapped block that, with the free blocks around it, has room; else a new segment's."""
    for _, unmapped in pool.unmapped:
        before = unmapped.prev
        first = before if before is not None and not before.allocated else unmapped
        if _free_run_bytes(first, size_bytes) >= size_bytes:
            return first
    page_bytes = SMALL_SEGMENT_BYTES if pool.small else allocator.settings.large_segment_size_bytes
    span_bytes = max(allocator.expandable_bytes(), size_bytes)
    span_bytes = -(-span_bytes // page_bytes) * page_bytes
    segment = ExpandableSegment(allocator.reserve_addresses(span_bytes), span_bytes, page_bytes)
    allocator.expandables.append(segment)
    block = Block(pool, segment.address, span_bytes, segment, mapped=False)
    pool.insert_unmapped(block)
    return block


def _free_run_bytes(first: Block, wanted_bytes: int) -> int:
    found, block = 0, first
    while found < wanted_bytes and not block.allocated:
        found += block.size_bytes
        if block.next is None:
            break
        block = block.next
    return found


def _map(allocator: Allocator, block: Block, size_bytes: int) -> bool:
    """Map the pages that hold the first `size_bytes` of an unmapped block, and join them with their free neighbours."""
    segment, pool = block.expandable, block.pool
    assert segment is not None
    mapped_bytes = segment.pages_up(block.address + size_bytes) - block.address
    if allocator.device_bytes is not None and (
        allocator.stats.reserved_bytes + mapped_bytes > allocator.device_bytes
    ):
        return False
    pool.remove_unmapped(block)
    rest_bytes = block.size_bytes - mapped_bytes
    if rest_bytes:
        rest = Block(pool, block.address + mapped_bytes, rest_bytes, segment, mapped=False)
        rest.insert_after(block)
        pool.insert_unmapped(rest)
    block.size_bytes, block.mapped = mapped_bytes, True
    allocator.grew(mapped_bytes)
    allocator.merge_neighbours(block)
    allocator.cache(block)
    return True
