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


def saved_elements(trace: Trace) -> tuple[int, int]:
    """Elements that autograd saved, but for those of weights; and these."""
    slots, kinds, found = trace.slots, trace.storages.category, [0, 0]
    for slot, storage in enumerate(slots.storage):
        found[kinds[storage] in _WEIGHTS] += math.prod(slots.shape.row(slot))
    return found[0], found[1]


def saved_bytes(trace: Trace) -> int:
    """What autograd saved, weights too."""
    slots = trace.slots
    return sum(
        math.prod(slots.shape.row(slot)) * ITEM_BYTES.get(trace.strings[dtype], _ITEM_BYTES)
        for slot, dtype in enumerate(slots.dtype)
    )


def may_grow(saved: int, others: Sequence[int], weights: int) -> float:
    """Times as many elements as the recorded iteration the largest one may save: more than the largest seen by as much again as they
    differ, but for far outliers. `saved`: elements that autograd saved in the recorded iteration, weights left out; `others`: in others
    of the same ops; `weights`: elements of those, which are saved in all of them. 1.0 where all saved as much."""
    known = [each for each in others if each > 0]
    if saved <= 0 or all(each == saved for each in known):
        return 1.0
    low, high = min(*known, saved), max(*known, saved)
    return max(1.0, (weights + high * min(high / low, _MOST_MORE)) / (weights + saved))
