"""Static offsets: where in one arena each storage of an iteration lies, when all sizes and lifetimes are known beforehand.

Also called dynamic storage allocation or offset planning; NP-hard. What is here:
  - greedy by size, best fit (Pisarchyk and Lee 2020, arXiv 2001.03288; as in XLA and TFLite): largest block first, into the
    tightest gap between the blocks that live at the same time. O(n^2), vectorised.
  - skyline best fit (Sekiyama et al. 2018, arXiv 1804.10001): take the lowest line of the skyline, put the longest-lived
    block that fits its span of time on it, lift the line when none does. O(n^2), vectorised.
  - `plan_offsets` takes the better of these and two more orders, and stops early at the bound.
The bound is the largest sum of live blocks; no layout is below it, and the best layout may lie above it. Blocks that live
throughout are laid at the bottom first, which never costs anything. Not here: exact solvers (MiniMalloc, TelaMalloc).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StaticOffsets:
    """One offset a block, the arena that they need, and the largest sum of live blocks, below which no arena can be."""

    offsets: Ints
    peak_bytes: int
    lower_bound_bytes: int
    method: str

    @property
    def overhead(self) -> float:
        """Share of the bound that the arena needs above it."""
        return self.peak_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


def plan_offsets(
    birth: Ints, death: Ints, size_bytes: Ints, *, alignment_bytes: int = 512, good_enough: float = 0.001
) -> StaticOffsets:
    """Offsets for blocks that live over `[birth, death)`: the best of several orders, the first within `good_enough` of the bound.

    Sizes are rounded up to `alignment_bytes`, and so are the offsets. A block of no bytes gets offset 0.
    Raises `ValueError` when the columns differ in length, a block dies before it is born, or a size is negative.
    """
    birth, death, sizes = _checked(birth, death, size_bytes, alignment_bytes)
    bound = largest_live_bytes(birth, death, sizes)
    best: StaticOffsets | None = None
    for method, place in _METHODS:
        offsets, peak = _with_permanent_at_bottom(place, birth, death, sizes)
        if best is None or peak < best.peak_bytes:
            best = StaticOffsets(offsets, peak, bound, method)
        if best.peak_bytes <= bound * (1 + good_enough):
            break
    assert best is not None, "there is at least one method"
    return best


def largest_live_bytes(birth: Ints, death: Ints, size_bytes: Ints) -> int:
    """The largest sum of blocks that live at the same time."""
    if len(birth) == 0:
        return 0
    times = np.concatenate([death, birth])
    change = np.concatenate([-size_bytes, size_bytes])
    # Stable: at the same time what dies goes before what is born.
    return max(int(np.cumsum(change[np.argsort(times, kind="stable")]).max()), 0)


def greedy_by_size(birth: Ints, death: Ints, size_bytes: Ints) -> Ints:
    """Offsets by best fit, largest block first (ties: earlier born)."""
    return _best_fit(np.lexsort((birth, -size_bytes)), birth, death, size_bytes)


def greedy_by_area(birth: Ints, death: Ints, size_bytes: Ints) -> Ints:
    """Offsets by best fit, largest bytes x lifetime first."""
    return _best_fit(
        np.lexsort((birth, -(size_bytes.astype(float) * (death - birth)))), birth, death, size_bytes
    )


def greedy_by_lifetime(birth: Ints, death: Ints, size_bytes: Ints) -> Ints:
    """Offsets by best fit, longest-lived first (ties: larger)."""
    return _best_fit(np.lexsort((-size_bytes, birth - death)), birth, death, size_bytes)


def skyline_best_fit(birth: Ints, death: Ints, size_bytes: Ints) -> Ints:
    """Offsets by Sekiyama's heuristic: lowest line first, on it the longest-lived block that fits."""
    if len(birth) == 0:
        return np.zeros(0, dtype=np.int64)
    return _Skyline(birth, death, size_bytes).run()


Placer = Callable[[Ints, Ints, Ints], Ints]
_METHODS: tuple[tuple[str, Placer], ...] = (
    ("greedy by size", greedy_by_size),
    ("greedy by area", greedy_by_area),
    ("skyline best fit", skyline_best_fit),
    ("greedy by lifetime", greedy_by_lifetime),
)


def _checked(birth: Ints, death: Ints, size_bytes: Ints, alignment_bytes: int) -> tuple[Ints, Ints, Ints]:
    birth, death, sizes = (np.asarray(column, dtype=np.int64) for column in (birth, death, size_bytes))
    if not len(birth) == len(death) == len(sizes):
        raise ValueError(f"columns of {len(birth)}, {len(death)} and {len(sizes)} blocks")
    if alignment_bytes < 1:
        raise ValueError(f"an alignment of {alignment_bytes} bytes")
    if len(birth) and ((death <= birth).any() or (sizes < 0).any()):
        raise ValueError("a block dies before it is born, or has a negative size")
    return birth, death, -(-sizes // alignment_bytes) * alignment_bytes


def _with_permanent_at_bottom(place: Placer, birth: Ints, death: Ints, sizes: Ints) -> tuple[Ints, int]:
    """Offsets and peak: blocks that live all the time below, those of no bytes at 0, the others placed by `place`."""
    offsets = np.zeros(len(birth), dtype=np.int64)
    if len(birth) == 0:
        return offsets, 0
    throughout = (birth == birth.min()) & (death == death.max())
    ends = np.cumsum(sizes[throughout])
    offsets[throughout] = ends - sizes[throughout]
    floor = int(ends[-1]) if len(ends) else 0
    rest = np.flatnonzero(~throughout & (sizes > 0))
    if len(rest) == 0:
        return offsets, floor
    offsets[rest] = floor + place(birth[rest], death[rest], sizes[rest])
    return offsets, int((offsets[rest] + sizes[rest]).max())


def _best_fit(order: Ints, birth: Ints, death: Ints, size_bytes: Ints) -> Ints:
    """Each block in `order` into the smallest gap that holds it among the placed blocks alive with it, else on top."""
    n = len(order)
    offsets = np.zeros(n, dtype=np.int64)
    births, deaths, lows, highs = (np.zeros(n, dtype=np.int64) for _ in range(4))  # placed, by offset
    for placed, block in enumerate(order.tolist()):
        size = int(size_bytes[block])
        together = np.flatnonzero((births[:placed] < death[block]) & (deaths[:placed] > birth[block]))
        offset = _tightest_gap(lows[together], highs[together], size)
        at = int(np.searchsorted(lows[:placed], offset))
        for column, value in (
            (births, birth[block]), (deaths, death[block]), (lows, offset), (highs, offset + size),
        ):  # fmt: skip
            column[at + 1 : placed + 1] = column[at:placed]
            column[at] = value
        offsets[block] = offset
    return offsets


def _tightest_gap(lows: Ints, highs: Ints, size: int) -> int:
    """Start of the smallest gap of at least `size` below or between spans sorted by `lows`; the end of all when none is."""
    if len(lows) == 0:
        return 0
    tops = np.maximum.accumulate(highs)
    starts = np.concatenate([[0], tops[:-1]])
    gaps = lows - starts
    fitting = np.flatnonzero(gaps >= size)
    if len(fitting) == 0:
        return int(tops[-1])
    return int(starts[fitting[np.argmin(gaps[fitting])]])


class _Skyline:
    """Lines of one height over spans of time, kept as linked columns; each ends where the next begins."""

    def __init__(self, birth: Ints, death: Ints, size_bytes: Ints) -> None:
        self.birth, self.death, self.size = birth, death, size_bytes
        # Longest-lived first (ties: larger), so that the first that fits is the one to take.
        self.waiting = np.lexsort((-size_bytes, birth - death))
        self.offsets = np.zeros(len(birth), dtype=np.int64)
        self.lines: list[list[int]] = [[int(birth.min()), int(death.max()), 0]]
        """[start, end, height], in order of time."""

    def run(self) -> Ints:
        while len(self.waiting):
            index = min(range(len(self.lines)), key=lambda i: self.lines[i][2])
            start, end, _ = self.lines[index]
            fitting = (self.birth[self.waiting] >= start) & (self.death[self.waiting] <= end)
            first = int(np.argmax(fitting))
            if not fitting[first]:
                self._lift(index)
                continue
            self._put(index, int(self.waiting[first]))
            self.waiting = np.delete(self.waiting, first)
        return self.offsets

    def _put(self, index: int, block: int) -> None:
        start, end, height = self.lines[index]
        born, died = int(self.birth[block]), int(self.death[block])
        self.offsets[block] = height
        pieces = [[start, born, height], [born, died, height + int(self.size[block])], [died, end, height]]
        self.lines[index : index + 1] = [piece for piece in pieces if piece[0] < piece[1]]

    def _lift(self, index: int) -> None:
        """Raise a line to its lower neighbour and join it with those of the same height."""
        start, end, _ = self.lines[index]
        neighbours = list(self._neighbours(index))
        height = min(self.lines[i][2] for i in neighbours)
        joined = [i for i in neighbours if self.lines[i][2] == height]
        low, high = min([index, *joined]), max([index, *joined])
        self.lines[low : high + 1] = [[min(start, self.lines[low][0]), max(end, self.lines[high][1]), height]]

    def _neighbours(self, index: int) -> Iterator[int]:
        if index > 0:
            yield index - 1
        if index + 1 < len(self.lines):
            yield index + 1
