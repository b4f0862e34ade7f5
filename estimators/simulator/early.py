"""When a storage can be made again before anybody asks for it: while what it is made of is still there."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from memopt.estimators.simulator.saved import Saved

_FIRST = -2
"""Ahead of all that consumers ask for at that moment, which is the unpacking of one of these; -1 is an order that is not known."""
_MOST_STEPS = 16
"""Of the walk from a storage to the saved ones that it is made of: a longer one is no short cut."""


def early_uses(
    saved: Mapping[int, Saved],
    producer: Sequence[int],
    storage_of: Sequence[int],
    reads: Sequence[Sequence[int]],
    unpacked: Iterable[int],
) -> dict[int, Saved]:
    """Storage -> what is saved of it, as if asked for at the last op of `unpacked` before which all that it is made of is there, where some
    of that goes before its own first use."""
    moments = sorted(unpacked)
    found = {}
    for each in saved.values():
        if each.value < 0 or each.is_weight or not each.plain:
            continue
        until = min(
            (source.release for source in _sources(each, saved, producer, storage_of, reads)), default=-1
        )
        at = bisect_right(moments, until) - 1
        if until < each.first_use and at >= 0 and each.gone_after + 1 < moments[at] < each.first_use:
            found[each.storage] = dataclasses.replace(each, first_use=moments[at], order=_FIRST)
    return found


def _sources(
    target: Saved,
    saved: Mapping[int, Saved],
    producer: Sequence[int],
    storage_of: Sequence[int],
    reads: Sequence[Sequence[int]],
) -> list[Saved]:
    """The saved storages that it is made of, by way of what nobody saves."""
    found: dict[int, Saved] = {}
    stack, seen = [target.value], {target.value}
    for _ in range(_MOST_STEPS):
        if not stack:
            break
        op = producer[stack.pop()]
        for value in reads[op] if op >= 0 else ():
            if value in seen:
                continue
            seen.add(value)
            source = saved.get(storage_of[value])
            if source is None:
                stack.append(value)
            elif not source.is_weight:
                found[source.storage] = source
    return list(found.values())
