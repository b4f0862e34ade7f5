"""Static offsets: no two live blocks overlap, the bound is a bound, and the arena is close to it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.advisors.counsel.static_offsets import (
    Ints,
    greedy_by_area,
    greedy_by_lifetime,
    greedy_by_size,
    largest_live_bytes,
    plan_offsets,
    skyline_best_fit,
)
from memopt.estimators.allocator.trace import load_allocator_trace

DATA = Path(__file__).parent.parent / "data" / "allocator_traces"
METHODS = (greedy_by_size, greedy_by_area, greedy_by_lifetime, skyline_best_fit)
BLOCKS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 9)), max_size=40)


def columns(rows: list[tuple[int, int, int]]) -> tuple[Ints, Ints, Ints]:
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 0] + table[:, 1], table[:, 2]


def assert_no_overlap(birth: Ints, death: Ints, size: Ints, offset: Ints) -> None:
    """At every birth, the spans of what is alive lie one after the other."""
    for now in np.unique(birth):
        alive = np.flatnonzero((birth <= now) & (now < death) & (size > 0))
        order = alive[np.argsort(offset[alive])]
        ends = offset[order] + size[order]
        assert (ends[:-1] <= offset[order][1:]).all()
        assert (offset[order] >= 0).all()


@settings(max_examples=200, deadline=None)
@given(BLOCKS)
def test_no_two_live_blocks_overlap(rows: list[tuple[int, int, int]]) -> None:
    birth, death, size = columns(rows)
    plan = plan_offsets(birth, death, size, alignment_bytes=1, good_enough=-1)
    assert_no_overlap(birth, death, size, plan.offsets)
    live = [sum(s for b, n, s in rows if b <= t < b + n) for t in range(60)]
    assert plan.lower_bound_bytes == max(live)
    assert plan.peak_bytes == max((plan.offsets + size)[size > 0], default=0) >= plan.lower_bound_bytes


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=100, deadline=None)
@given(rows=BLOCKS)
def test_each_method_by_itself(method: object, rows: list[tuple[int, int, int]]) -> None:
    birth, death, size = columns(rows)
    assert_no_overlap(birth, death, size, method(birth, death, size))  # type: ignore[operator]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6))
def test_near_the_best_layout_of_few_blocks(rows: list[tuple[int, int, int]]) -> None:
    birth, death, size = columns(rows)
    plan = plan_offsets(birth, death, size, alignment_bytes=1, good_enough=0)
    best = brute_force(rows)
    assert plan.lower_bound_bytes <= best <= plan.peak_bytes
    assert plan.peak_bytes <= best + max(size)


def brute_force(rows: list[tuple[int, int, int]]) -> int:
    """Least arena: some best layout is made by placing the blocks in some order, each at the lowest place that is free."""
    least = sum(size for _, _, size in rows)
    for order in itertools.permutations(rows):
        placed: list[tuple[int, int, int, int]] = []
        for birth, length, size in order:
            spans = sorted((o, o + s) for b, n, s, o in placed if b < birth + length and birth < b + n)
            offset = 0
            for low, high in spans:
                if offset + size <= low:
                    break
                offset = max(offset, high)
            placed.append((birth, length, size, offset))
        least = min(least, max(o + s for _, _, s, o in placed))
    return least


def test_exact_on_a_toy() -> None:
    # A 3 lives first, B 2 throughout, C 3 after A: C takes A's place above B.
    birth, death, size = np.array([0, 0, 2]), np.array([2, 4, 4]), np.array([3, 2, 3])
    plan = plan_offsets(birth, death, size, alignment_bytes=1)
    assert plan.offsets.tolist() == [2, 0, 2]
    assert (plan.peak_bytes, plan.lower_bound_bytes, plan.overhead) == (5, 5, 0.0)


def test_offsets_are_aligned() -> None:
    plan = plan_offsets(np.array([0, 0, 1]), np.array([2, 3, 3]), np.array([1, 700, 0]))
    assert sorted(plan.offsets.tolist()) == [0, 0, 1024]
    assert plan.peak_bytes == 1536


@pytest.mark.parametrize(
    ("birth", "death", "size"), [([0], [0], [1]), ([0], [1], [-1]), ([0, 1], [2], [1]), ([2], [1], [1])]
)
def test_senseless_input_is_refused(birth: list[int], death: list[int], size: list[int]) -> None:
    with pytest.raises(ValueError, match="block"):
        plan_offsets(np.array(birth), np.array(death), np.array(size))


def test_nothing_needs_nothing() -> None:
    empty = np.zeros(0, dtype=np.int64)
    assert plan_offsets(empty, empty, empty).peak_bytes == 0


@pytest.mark.parametrize("name", ["medium_512_training", "medium_512_inference", "bcrafton_h0c0e8a7"])
def test_within_two_percent_on_recorded_runs_in_little_time(name: str) -> None:
    events = load_allocator_trace(DATA / f"{name}.json.gz").from_empty()
    born: dict[int, tuple[int, int]] = {}
    rows: list[tuple[int, int, int]] = []
    for position, (handle, size) in enumerate(
        zip(events.handle.tolist(), events.size_bytes.tolist(), strict=True)
    ):
        if size > 0:
            born[handle] = (position, size)
        elif size < 0:
            start, held = born.pop(handle)
            rows.append((start, position - start, held))
    rows += [(start, len(events) - start, held) for start, held in born.values()]
    birth, death, sizes = columns(rows)
    started = time.process_time()
    sum(number * number for number in range(3_000_000))  # 0.2 s
    a_while, started = time.process_time() - started, time.process_time()
    plan = plan_offsets(birth, death, sizes)
    assert time.process_time() - started < 20 * a_while
    assert 0 <= plan.overhead < 0.02
    rounded = -(-sizes // 512) * 512
    assert plan.lower_bound_bytes == largest_live_bytes(birth, death, rounded)
    assert_no_overlap(birth, death, rounded, plan.offsets)
