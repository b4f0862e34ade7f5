"""The caching allocator: exact layouts from public snapshots, each rule by its smallest case, invariants on random input."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.estimators.allocator.blocks import Block
from memopt.estimators.allocator.caching import CachingAllocator, OutOfDeviceMemory
from memopt.estimators.allocator.settings import MIB, AllocatorSettings, parse_settings

KIB = 1024


def allocator(text: str = "", limit_bytes: int | None = None, **more: int) -> CachingAllocator:
    return CachingAllocator(parse_settings(text), limit_bytes, **more)


def layout(block: Block | None) -> list[tuple[int, bool]]:
    """(size, live) of every block of the segment that `block` is in."""
    assert block is not None
    while block.prev is not None:
        block = block.prev
    rows = []
    while block is not None:
        rows.append((block.size_bytes, block.allocated))
        block = block.next
    return rows


def test_layout_of_discuss_178671() -> None:
    a = allocator()
    for name, size in enumerate((40000, 40, 4000, 40, 40)):
        a.malloc(name, size)
    a.free(3)
    assert layout(a.live[0]) == [
        (40448, True), (512, True), (4096, True), (512, False), (512, True), (2051072, False),
    ]  # fmt: skip
    assert (a.stats.allocated_bytes, a.stats.reserved_bytes) == (45568, 2 * MIB)


def test_cublas_workspace_alone_takes_a_segment_of_20_mib() -> None:
    a = allocator()
    assert layout(a.malloc(0, 8519680)) == [(8519680, True), (12451840, False)]
    assert a.stats.reserved_bytes == 20971520


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded first: no longer below 10 MiB
        (11 * MIB, 12 * MIB, 12 * MIB),  # a remainder of 1 MiB is not cut off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_rounding_and_segments(request_bytes: int, block_bytes: int, reserved_bytes: int) -> None:
    a = allocator()
    a.malloc(0, request_bytes)
    assert (a.stats.allocated_bytes, a.stats.reserved_bytes) == (block_bytes, reserved_bytes)
    assert a.stats.requested_bytes == request_bytes


def test_nothing_asked_is_no_block() -> None:
    a = allocator()
    assert a.malloc(7, 0) is None
    a.free(7)
    assert a.stats.peak_reserved_bytes == 0


@pytest.mark.parametrize("wrong", [lambda a: a.free(1), lambda a: a.malloc(0, 8), lambda a: a.malloc(1, -8)])
def test_wrong_handles_are_refused(wrong: object) -> None:
    a = allocator()
    a.malloc(0, 512)
    with pytest.raises(ValueError, match="handle"):
        wrong(a)  # type: ignore[operator]


def test_best_fit_and_ties_by_lowest_address() -> None:
    a = allocator()
    blocks = [a.malloc(i, 600 * KIB) for i in range(4)]  # three in the first segment, the fourth in another
    keep = [block.address for block in blocks if block]
    for i in (2, 1, 3):
        a.free(i)
    # Free now: 1448 KiB behind block 0, and the whole second segment (2 MiB): the tighter one serves.
    found = a.malloc(9, 600 * KIB)
    assert found is not None
    assert found.address == keep[1]


def test_equal_blocks_are_taken_lowest_first() -> None:
    a = allocator()
    blocks = [a.malloc(i, 20 * MIB) for i in range(3)]
    for i in (2, 0, 1):
        a.free(i)
    again = [a.malloc(10 + i, 20 * MIB) for i in range(3)]
    assert [b.address for b in again if b] == sorted(b.address for b in blocks if b)


def test_streams_do_not_share_blocks() -> None:
    a = allocator()
    a.malloc(0, 20 * MIB, stream=0)
    a.free(0)
    a.malloc(1, 20 * MIB, stream=7)
    assert a.stats.reserved_bytes == 40 * MIB
    a.malloc(2, 20 * MIB, stream=0)
    assert a.stats.reserved_bytes == 40 * MIB


def test_free_merges_with_both_neighbours() -> None:
    a = allocator()
    blocks = [a.malloc(i, 4 * MIB) for i in range(5)]
    for i in (0, 2, 1):
        a.free(i)
    assert layout(blocks[4]) == [(12 * MIB, False), (4 * MIB, True), (4 * MIB, True)]


def test_at_the_limit_unsplit_segments_are_released_and_the_request_retried() -> None:
    a = allocator(limit_bytes=64 * MIB)
    a.malloc(0, 40 * MIB)
    a.free(0)
    a.malloc(1, 50 * MIB)
    assert (a.stats.reserved_bytes, a.stats.retries, a.stats.peak_reserved_bytes) == (50 * MIB, 1, 50 * MIB)


def test_a_fragment_pins_its_segment_until_out_of_memory() -> None:
    a = allocator(limit_bytes=64 * MIB)
    a.malloc(0, 2 * MIB)  # 20 MiB segment, 18 free
    with pytest.raises(OutOfDeviceMemory) as caught:
        a.malloc(1, 46 * MIB)
    assert (caught.value.requested_bytes, caught.value.reserved_bytes) == (46 * MIB, 20 * MIB)
    a.malloc(1, 44 * MIB)
    assert a.stats.reserved_bytes == 64 * MIB


def test_empty_cache() -> None:
    a = allocator()
    a.malloc(0, 30 * MIB)
    a.malloc(1, 2 * MIB)
    a.malloc(2, 100)
    a.free(0)
    a.free(2)
    a.empty_cache()
    assert a.stats.reserved_bytes == 20 * MIB


@pytest.mark.parametrize(
    ("request_bytes", "divisions", "block_bytes"),
    [
        (1200, 4, 1536),  # not above 512 x 4: plain rounding
        (2049, 4, 2560),
        (5 * MIB, 4, 5 * MIB),
        (5 * MIB + 1, 4, 6 * MIB),
        (4 * MIB, 4, 4 * MIB),
        (9 * MIB, 2, 12 * MIB),
        (9 * MIB, 1, 9 * MIB),
        (3 * MIB, 2, 3 * MIB),
    ],
)
def test_roundup_power2_divisions(request_bytes: int, divisions: int, block_bytes: int) -> None:
    a = allocator(f"roundup_power2_divisions:{divisions}")
    a.malloc(0, request_bytes)
    assert a.stats.allocated_bytes == block_bytes


def test_roundup_lists_count_by_the_power_of_two_of_the_request() -> None:
    # The case of PyTorch's own test_cuda.py.
    a = allocator("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:1,>:1]")
    a.malloc(0, 84 * MIB)  # 64..128 MiB: steps of 8 MiB
    assert a.stats.allocated_bytes == 88 * MIB
    a.free(0)
    a.empty_cache()
    a.malloc(0, 150 * MIB)  # 128..256 MiB: steps of 64 MiB
    assert a.stats.allocated_bytes == 192 * MIB


def test_max_split_size_keeps_large_blocks_whole() -> None:
    a = allocator("max_split_size_mb:32")
    a.malloc(0, 64 * MIB)
    a.free(0)
    a.malloc(1, 30 * MIB)  # may not cut the oversize block
    assert a.stats.reserved_bytes == 94 * MIB
    a.malloc(2, 50 * MIB)  # oversize: may take it whole, 14 MiB larger
    assert (a.stats.reserved_bytes, a.stats.allocated_bytes) == (94 * MIB, 94 * MIB)
    a.free(2)
    a.malloc(3, 40 * MIB)  # 24 MiB larger: more than max_non_split_rounding
    assert a.stats.reserved_bytes == 134 * MIB


def test_max_non_split_rounding() -> None:
    a = allocator("max_split_size_mb:32,max_non_split_rounding_mb:64")
    a.malloc(0, 64 * MIB)
    a.free(0)
    a.malloc(3, 40 * MIB)
    assert (a.stats.reserved_bytes, a.stats.allocated_bytes) == (64 * MIB, 64 * MIB)


def test_oversize_blocks_are_released_before_all_others() -> None:
    a = allocator("max_split_size_mb:32", limit_bytes=170 * MIB)
    a.malloc(0, 100 * MIB)
    a.malloc(1, 30 * MIB)
    a.free(0)
    a.free(1)
    a.malloc(2, 60 * MIB)  # the 100 MiB block is 40 too large; freeing it makes room, the 30 MiB one stays
    assert (a.stats.reserved_bytes, a.stats.retries) == (90 * MIB, 0)


def test_several_oversize_blocks_are_released_largest_first() -> None:
    a = allocator("max_split_size_mb:32", limit_bytes=200 * MIB)
    for i, mib in enumerate((40, 60, 50, 30)):
        a.malloc(i, mib * MIB)
    for i in range(4):
        a.free(i)
    a.malloc(9, 110 * MIB)  # 60 + 50 go; 40 and 30 stay
    assert (a.stats.reserved_bytes, a.stats.retries) == (180 * MIB, 0)


def test_garbage_collection_frees_the_old_blocks() -> None:
    a = allocator("garbage_collection_threshold:0.5", limit_bytes=200 * MIB)
    a.malloc(0, 60 * MIB)
    a.free(0)  # the old one
    a.malloc(1, 70 * MIB)
    a.free(1)
    a.malloc(
        3, 80 * MIB
    )  # 130 reserved > 100: ages 2 and 1, so only the older one is at least of the mean age
    assert (a.stats.reserved_bytes, a.stats.retries) == (150 * MIB, 0)


def test_large_segment_size() -> None:
    a = allocator("large_segment_size_mb:64")
    a.malloc(0, 2 * MIB)
    assert a.stats.reserved_bytes == 64 * MIB


def test_expandable_segments_map_only_what_is_missing() -> None:
    a = allocator("expandable_segments:True")
    a.malloc(0, 3 * MIB)
    assert (a.stats.reserved_bytes, a.stats.allocated_bytes) == (20 * MIB, 3 * MIB)
    a.malloc(1, 30 * MIB)  # a tail of 17 MiB is used, 13 are missing: one page
    assert a.stats.reserved_bytes == 40 * MIB
    a.malloc(2, 19 * MIB)
    assert a.stats.reserved_bytes == 60 * MIB


def test_expandable_tail_counts_as_large_as_it_can_grow() -> None:
    a = allocator("expandable_segments:True")
    a.malloc(0, 30 * MIB)
    a.malloc(1, 5 * MIB)  # tail: 5 MiB
    a.free(0)
    inside = a.malloc(2, 4 * MIB)  # the tail fits tighter by size, but counts with the room behind it
    assert inside is not None
    assert inside.address == a.expandables[0].address


def test_expandable_pages_are_unmapped_at_the_limit() -> None:
    a = allocator("expandable_segments:True", limit_bytes=100 * MIB)
    a.malloc(0, 50 * MIB)
    a.malloc(1, 30 * MIB)
    a.free(0)  # 50 MiB free at the front: pages 0 and 1 are whole, page 2 is shared
    a.malloc(2, 500, stream=3)
    a.malloc(3, 55 * MIB)
    assert (a.stats.retries, a.stats.reserved_bytes) == (1, 102 * MIB)


def test_device_memory_ends() -> None:
    a = allocator("expandable_segments:True", device_bytes=50 * MIB)
    a.malloc(0, 35 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        a.malloc(1, 10 * MIB)


CONFIGS = (
    "", "expandable_segments:True", "max_split_size_mb:24", "garbage_collection_threshold:0.3",
    "roundup_power2_divisions:4", "max_split_size_mb:20,garbage_collection_threshold:0.6,large_segment_size_mb:20",
    "expandable_segments:True,large_segment_size_mb:32",
)  # fmt: skip
SIZES = st.one_of(st.integers(0, 3000), st.integers(0, 3 * MIB), st.integers(0, 60 * MIB))
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1), st.integers(0, 1 << 30)), max_size=80)


@settings(max_examples=250, deadline=None)
@given(
    text=st.sampled_from(CONFIGS),
    limit=st.sampled_from([None, 100 * MIB, 300 * MIB]),
    device=st.sampled_from([None, 90 * MIB, 250 * MIB]),
    steps=STEPS,
)
def test_invariants_hold_at_every_step(
    text: str, limit: int | None, device: int | None, steps: list[tuple[bool, int, int, int]]
) -> None:
    a = CachingAllocator(parse_settings(text), limit, device_bytes=device)
    live: dict[int, tuple[int, int]] = {}
    for handle, (allocate, size, stream, pick) in enumerate(steps):
        if allocate or not live:
            try:
                a.malloc(handle, size, stream)
            except OutOfDeviceMemory:
                assert limit is not None or device is not None
                continue
            live[handle] = (size, stream)
        else:
            gone = sorted(live)[pick % len(live)]
            a.free(gone)
            del live[gone]
        check(a, live)
    a.empty_cache()
    for handle in live:
        a.free(handle)
    a.empty_cache()
    assert a.stats.reserved_bytes == 0 or "expandable" in text
    assert (a.stats.allocated_bytes, a.stats.requested_bytes) == (0, 0)


def check(a: CachingAllocator, live: dict[int, tuple[int, int]]) -> None:
    """What must hold whatever the settings, computed from the blocks' addresses alone."""
    blocks = sorted(a.blocks(), key=lambda block: block.address)
    for left, right in itertools.pairwise(blocks):
        assert left.address + left.size_bytes <= right.address, "blocks overlap"
    held = {handle: block for handle, block in a.live.items() if block is not None}
    assert set(held) == {handle for handle, (size, _) in live.items() if size}
    for handle, block in held.items():
        size, stream = live[handle]
        assert block.allocated
        assert block.size_bytes >= size
        assert block.pool.stream == stream
    assert a.stats.requested_bytes == sum(size for size, _ in live.values())
    assert a.stats.allocated_bytes == sum(block.size_bytes for block in held.values())
    assert a.stats.reserved_bytes == sum(block.size_bytes for block in blocks)
    assert a.stats.allocated_bytes <= a.stats.reserved_bytes <= a.stats.peak_reserved_bytes
    if a.settings.expandable_segments:
        pages = sum(block.size_bytes for block in blocks)
        assert pages % (2 * MIB) == 0
    else:
        assert a.stats.reserved_bytes == sum(a.segments.values())
    for block in blocks:
        if block.next is not None and not block.allocated and block.next.mapped:
            assert block.next.allocated, "free neighbours are merged"
    if a.device_bytes is not None:
        assert a.stats.peak_reserved_bytes <= a.device_bytes
    if a.limit_bytes is not None:
        # The limit is asked about a segment's size, and then whole pages are mapped: PyTorch oversteps it so, too.
        page = a.settings.large_segment_size_bytes if a.settings.expandable_segments else 0
        assert a.stats.peak_reserved_bytes <= a.limit_bytes + page


def test_default_settings_are_used_when_none_are_given() -> None:
    assert CachingAllocator().settings == AllocatorSettings()
