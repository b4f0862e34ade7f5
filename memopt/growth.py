"""How much more than the recorded iteration another one may save, where iterations of a script differ in size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memopt.codecs.meta import ITEM_BYTES
from memopt.trace import CATEGORIES, Trace

_WEIGHTS = frozenset(CATEGORIES.index(name) for name in ("parameter", "buffer"))
_ITEM_BYTES = 4
_MOST_MORE = 1.35
"""Times the largest iteration seen so far that a plan allows for."""
_MOST_MOVED = 0.05
"""Share by which a plan allows for another peak where iterations save as much in all, and sizes of tensors differ."""


def saved_elements(trace: Trace) -> tuple[int, int]:
    """Elements that autograd saved, but for those of weights; and these."""
    kinds, found = trace.storages.category, [0, 0]
    for storage, size in zip(trace.slots.storage, saved_sizes(trace), strict=True):
        found[kinds[storage] in _WEIGHTS] += size
    return found[0], found[1]


def saved_bytes(trace: Trace) -> int:
    """What autograd saved, weights too."""
    slots = trace.slots
    return sum(
        math.prod(slots.shape.row(slot)) * ITEM_BYTES.get(trace.strings[dtype], _ITEM_BYTES)
        for slot, dtype in enumerate(slots.dtype)
    )


def saved_sizes(trace: Trace) -> list[int]:
    """Elements of each tensor that autograd saved."""
    shapes = trace.slots.shape
    return [math.prod(shapes.row(slot)) for slot in range(len(trace.slots.storage))]


def may_move(sizes: Sequence[int], before: Sequence[int]) -> float:
    """Times as much as the recorded iteration, whose saved tensors have these `sizes`, another one may take, as those of one `before` it tell: rows
    that are sent to other experts change no sum, and the peak. Twice what has moved: others may move as much the other way. 1.0 where that one saved
    more or fewer tensors."""
    if len(sizes) != len(before):
        return 1.0
    moved = sum(max(0, now - then) for now, then in zip(sizes, before, strict=True))
    return 1 + min(_MOST_MOVED, 2 * moved / max(1, sum(sizes)))


def may_grow(saved: int, others: Sequence[int], weights: int) -> float:
    """Times as many elements as the recorded iteration the largest one may save: more than the largest seen by as much again as they
    differ, but for far outliers. `saved`: elements that autograd saved in the recorded iteration, weights left out; `others`: in others
    of the same ops; `weights`: elements of those, which are saved in all of them. 1.0 where all saved as much."""
    known = [each for each in others if each > 0]
    if saved <= 0 or all(each == saved for each in known):
        return 1.0
    low, high = min(*known, saved), max(*known, saved)
    return max(1.0, (weights + high * min(high / low, _MOST_MORE)) / (weights + saved))
