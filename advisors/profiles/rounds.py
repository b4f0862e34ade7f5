"""The rounds of a recorded iteration, such as the micro-batches of an accumulated step, and which of them are alike.

Where hardly anything crosses that a plan could move, the op stream is cut: between two hills of what autograd saved, at the narrowest. Rounds
are alike when their ops are the same, read and write the same, counted from where the round begins, and save the same slots. Times, sizes
and lifetimes may differ, as they do a little from round to round. O(ops + slots).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memopt.advisors.profiles.problem import may_act_on
from memopt.advisors.rounds import REPEATED, valleys
from memopt.estimators.simulator.trace_view import TraceView

_HILL = 0.5
"""A hill rises above this share of the highest."""
_NARROW = 0.1
"""A cut is crossed by at most this share of it."""


@dataclass(frozen=True, slots=True)
class Round:
    """The ops from `begin` to `end`; its storages, in the order in which they are named, and its slots, those of the trace."""

    begin: int
    end: int
    peak_bytes: int
    storages: tuple[int, ...]
    slots: tuple[int, ...]
    shape: Hashable


def find_kinds(view: TraceView) -> list[list[Round]]:
    """The rounds by kind, in each the one with the highest peak first; none where there is little to gain from them."""
    bounds = [0, *_cuts(view), view.n]
    if len(bounds) == 2:
        return []
    by_shape: dict[Hashable, list[Round]] = defaultdict(list)
    slots = _slots_of(view, bounds)
    for place, (begin, end) in enumerate(pairwise(bounds)):
        found = _round(view, begin, end, slots[place])
        by_shape[found.shape].append(found)
    kinds = [sorted(kind, key=lambda each: -each.peak_bytes) for kind in by_shape.values()]
    return kinds if sum(kind[0].end - kind[0].begin for kind in kinds) <= REPEATED * view.n else []


def _cuts(view: TraceView) -> list[int]:
    """Ops before which a round begins."""
    change = np.zeros(view.n + 2, dtype=np.int64)
    for saved in view.saved.values():
        if may_act_on(view, saved):
            change[view.birth[saved.storage] + 1] += saved.size_bytes
            change[saved.release + 1] -= saved.size_bytes
    crossing = np.cumsum(change)[: view.n]
    highest = int(crossing.max(initial=0))
    between = valleys(crossing > _HILL * highest)
    cuts = [low + int(np.argmin(crossing[low : high + 1])) for low, high in between]
    return [cut for cut in cuts if crossing[cut] <= _NARROW * highest]


def _slots_of(view: TraceView, bounds: list[int]) -> list[list[int]]:
    """The slots of each round: those whose storage it makes, or that it packs where the storage was there before."""
    slots = view.trace.slots
    found: list[list[int]] = [[] for _ in bounds]
    birth: list[int] = view.birth.tolist()
    for slot, (storage, packed) in enumerate(zip(slots.storage, slots.packed_before, strict=True)):
        op = birth[storage] if birth[storage] >= 0 else max(0, packed - 1)
        found[bisect_right(bounds, min(op, view.n - 1)) - 1].append(slot)
    return found


def _round(view: TraceView, begin: int, end: int, slots: list[int]) -> Round:
    ops = view.trace.ops
    values: dict[int, int] = {}
    rows = tuple(
        (
            ops.name[op],
            ops.phase[op],
            ops.flags[op],
            tuple([values.setdefault(value, len(values)) for value in view.reads[op]]),
            tuple([values.setdefault(value, len(values)) for value in view.writes[op]]),
        )
        for op in range(begin, end)
    )
    storages: dict[int, int] = {}
    of_value = tuple([storages.setdefault(view.value_storage[value], len(storages)) for value in values])
    saved = tuple(_saved(view, slot, begin, values, storages) for slot in slots)
    return Round(
        begin=begin,
        end=end,
        peak_bytes=int(view.high[begin:end].max(initial=0)),
        storages=tuple(storages),
        slots=tuple(slots),
        shape=(rows, of_value, saved),
    )


def _saved(
    view: TraceView, slot: int, begin: int, values: dict[int, int], storages: dict[int, int]
) -> tuple[Hashable, ...]:
    slots = view.trace.slots
    return (
        storages.setdefault(slots.storage[slot], len(storages)),
        values.get(slots.value[slot]),
        slots.node[slot],
        slots.slot[slot],
        slots.dtype[slot],
        slots.attributes[slot],
        slots.plain[slot],
        slots.packed_before[slot] - begin,
        tuple([op - begin for op in slots.unpacks.row(slot)]),
    )
