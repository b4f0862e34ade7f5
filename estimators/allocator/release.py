"""How the caching allocator gives cached memory back: garbage collection, oversize blocks, everything unused."""

from __future__ import annotations

from memopt.estimators.allocator.blocks import Allocator, Block, FreeList
from memopt.estimators.allocator.expandable import unmap_free_pages
from memopt.estimators.allocator.settings import UNLIMITED_BYTES


def release_cached(allocator: Allocator) -> None:
    """Free every segment that is one free block, and unmap every free page of expandable segments."""
    for pool in allocator.free_lists():
        for block in pool:
            if block.expandable is None and block.whole_segment():
                _release(allocator, block)
        for block in pool:
            if block.expandable is not None:
                unmap_free_pages(allocator, block)


def release_oversize(allocator: Allocator, pool: FreeList, size_bytes: int) -> bool:
    """With `max_split_size`: free one oversize block that is large enough, else several, largest first. Was it enough?"""
    least_bytes = allocator.settings.max_split_size_bytes
    if least_bytes == UNLIMITED_BYTES:
        return False
    wanted_bytes = max(size_bytes, least_bytes)
    index = pool.first_at_least(wanted_bytes)
    if index < len(pool):
        block = pool.at(index)
        if block.expandable is not None:
            return False
        _release(allocator, block)
        return True
    released_bytes = 0
    for block in reversed(list(pool)):
        if released_bytes >= wanted_bytes or block.size_bytes < least_bytes:
            break
        if block.expandable is None:
            released_bytes += block.size_bytes
            _release(allocator, block)
    return released_bytes >= wanted_bytes


def collect_garbage(allocator: Allocator) -> None:
    """Free unsplit large blocks of at least the mean age until what is reserved falls below the threshold."""
    threshold_bytes = int(allocator.settings.garbage_collection_threshold * (allocator.limit_bytes or 0))
    excess_bytes = allocator.stats.reserved_bytes - threshold_bytes
    if excess_bytes <= 0:
        return
    now = allocator.searches[False]
    pools = [pool for pool in allocator.free_lists() if not pool.small]
    unsplit = [block for pool in pools for block in pool if block.whole_segment()]
    freed = True
    while excess_bytes > 0 and freed and unsplit:
        mean_age = sum(now - block.free_since for block in unsplit) / len(unsplit)
        old = [block for block in unsplit if block.expandable is None and now - block.free_since >= mean_age]
        for block in old:
            excess_bytes -= block.size_bytes
            unsplit.remove(block)
            _release(allocator, block)
        freed = bool(old)


def _release(allocator: Allocator, block: Block) -> None:
    block.pool.remove(block)
    del allocator.segments[block.address]
    allocator.grew(-block.size_bytes)
