"""PYTORCH_ALLOC_CONF as PyTorch reads it: what is accepted, what is refused, and how lists fill the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.errors import UsageError
from memopt.estimators.allocator.settings import MIB, AllocatorSettings, parse_settings, round_request


def test_empty_is_the_default() -> None:
    assert parse_settings("") == parse_settings(" , ") == AllocatorSettings()


def test_all_at_once() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],large_segment_size_mb:32,max_non_split_rounding_mb:40,"
        "per_process_memory_fraction:0.5,pinned_num_register_threads:8,backend:native"
    )
    assert parse_settings(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_size_bytes=128 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(1,) * 9 + (2, 4) + (8,) * 5,
        large_segment_size_bytes=32 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        per_process_memory_fraction=0.5,
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("expandable_segment:True", "not an allocator setting"),
        ("expandable_segments:true", "neither True nor False"),
        ("expandable_segments", "has no value"),
        ("max_split_size_mb:19", "too small"),
        ("max_split_size_mb:-5", "not a whole number"),
        ("max_split_size_mb:1e3", "not a whole number"),
        ("max_split_size_mb:٣٣", "not a whole number"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "too small"),
        ("large_segment_size_mb:10", "too small"),
        ("roundup_power2_divisions:0", "not a power of two"),
        ("garbage_collection_threshold:1.0", "out of range"),
        ("garbage_collection_threshold:nan", "out of range"),
        ("garbage_collection_threshold:x", "out of range"),
        ("roundup_power2_divisions:3", "not a power of two"),
        ("roundup_power2_divisions:[256:3]", "not a power of two"),
        ("roundup_power2_divisions:[0:4]", "not a power of two"),
        ("roundup_power2_divisions:[256]", "not MIB:DIVISIONS"),
        ("roundup_power2_divisions:[256:1", "do not match"),
        ("backend:cudaMallocAsync", "cannot be simulated"),
    ],
)
def test_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(text)
    assert complaint in caught.value.what
    assert caught.value.try_


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings("max_split_size:64")
    assert "max_split_size_mb:" in caught.value.try_


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("[64:8,1024:2]", (8,) * 7 + (0, 0, 0, 2) + (0,) * 5),
        ("[64:8,1024:2,>:4]", (8,) * 7 + (0, 0, 0, 2) + (4,) * 5),
        ("[>:4]", (0,) + (4,) * 15),
        ("[1024:2,64:8]", (2,) * 6 + (8,) + (2,) * 4 + (0,) * 5),
    ],
)
def test_lists_fill_the_table_as_libc10_does(text: str, table: tuple[int, ...]) -> None:
    """The tables were printed by torch 2.13's own parser (c10::CachingAllocator::AcceleratorAllocatorConfig)."""
    assert parse_settings(f"roundup_power2_divisions:{text}").roundup_power2_divisions == table


@given(st.text(alphabet="abcdexpandable_segments:True,[]>0123456789._ ", max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse_settings(text)
    except UsageError:
        return


@given(st.integers(1, 1 << 40), st.sampled_from([1, 2, 4, 8, 16]))
def test_rounding_is_the_next_division(size: int, divisions: int) -> None:
    rounded = round_request(size, parse_settings(f"roundup_power2_divisions:{divisions}"))
    assert rounded >= size
    if divisions > 1 and size > 512 * divisions:
        floor = 1 << (size.bit_length() - 1)
        candidates = [floor + floor * k // divisions for k in range(divisions + 1)]
        assert rounded == min(c for c in candidates if c >= size)
    else:
        assert rounded == max((size + 511) // 512 * 512, 512)
