"""How much more than the recorded iteration another one may save, where iterations of a script differ in size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memopt.codecs.meta import ITEM_BYTES
from memopt.trace import CATEGORIES, Trace

_WEIGHTS = frozenset(CATEGORIES.index(name) for name in ("parameter", "buffer"))
_ITEM_BYTES = 4
_MOST_MORE = 1.35
"""Times the largest iteration seen so far that a plan allows for."""
_FEWEST, _ALIKE = 0.5, 0.05
"""Iterations with other numbers of the same steps save at least this share of the other's tensors, and about as many elements to each."""
_MOST_MOVED = 0.05
"""Share by which a plan allows for another peak where iterations save as much in all, and sizes of tensors differ."""


class Saved(NamedTuple):
    """Elements that autograd saved in an iteration."""

    growing: int
    """But for those of weights."""
    weights: int
    """Of weights, each counted once."""
    again: int
    """Of weights that several calls have saved (each time step of a recurrent layer does), but for the first."""

    @classmethod
    def of(cls, slots: Iterable[tuple[int, int, bool]]) -> Saved:
        """`slots`: of each saved tensor the storage, its elements, and whether it shows a weight."""
        growing = weights = again = 0
        met: set[int] = set()
        for storage, size, is_weight in slots:
            if not is_weight:
                growing += size
            elif storage in met:
                again += size
            else:
                met.add(storage)
                weights += size
        return cls(growing, weights, again)


def saved_elements(trace: Trace) -> Saved:
    """Of the recorded iteration."""
    kinds, storages = trace.storages.category, trace.slots.storage
    sizes = saved_sizes(trace)
    return Saved.of((row, size, kinds[row] in _WEIGHTS) for row, size in zip(storages, sizes, strict=True))


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


def may_grow(saved: Saved, tensors: int, others: Sequence[tuple[int, int]]) -> float:
    """Times as many elements as the recorded iteration, with its `tensors`, the largest one may save: more than the largest seen by as much again as
    they differ, but for far outliers. `others`: how many tensors, and elements, autograd saved in others. Those count that saved as many tensors, or
    so much more or less of both that they have other numbers of the same steps (a recurrent layer on sentences). 1.0 where all saved as much."""
    total, known = sum(saved), [saved.growing]
    for count, elements in others:
        steps = count / max(1, tensors)
        if count == tensors or (
            _FEWEST < steps < 1 / _FEWEST and abs(elements / (steps * total) - 1) < _ALIKE
        ):
            known.append(round(elements - saved.weights - steps * saved.again))
    known = [each for each in known if each > 0]
    if saved.growing <= 0 or all(each == saved.growing for each in known):
        return 1.0
    low, high = min(known), max(known)
    grown = high * min(high / low, _MOST_MORE) / saved.growing
    return max(1.0, (saved.weights + grown * (saved.growing + saved.again)) / total)
