"""A recorded iteration as it would run with the state of optimizers that step as they are in a tier between their steps.

All of it comes back before the step, so that the step itself is as recorded; before and after it the state is not there. Storages, slots and
ops keep their numbers. ZeRO-Offload (Ren et al., ATC 2021) keeps such state in the host's memory and computes the step there; here the
device does, and the bits are its own.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from memopt.device import Device
from memopt.estimators.simulator.costs import pace_of
from memopt.plan import Tier
from memopt.trace import CATEGORIES, Trace
from memopt.updates import Step

_STATE = CATEGORIES.index("optimizer state")

TENSOR_MS = 0.05
"""Per tensor that leaves and comes back: looked up, emptied and filled."""


@dataclass(frozen=True, slots=True)
class Away:
    """What leaves."""

    from_bytes: int
    """The smallest of it."""
    tensors: int
    size_bytes: int


def whole_steps(trace: Trace) -> list[Step]:
    """Steps that cannot be taken in pieces, of optimizers whose state may be away between steps."""
    updates = trace.updates
    steps = updates.steps if updates is not None and not trace.partial else []
    return [step for step in steps if step.in_pieces and not step.state_stays and step.state]


def state_away(trace: Trace, tier: Tier, device: Device, share: float = 1.0) -> tuple[Trace, Away] | None:
    """The trace with the largest tensors of state away that have `share` of what may be; None where nothing may, or the device has no such
    tier."""
    spans = _spans(trace)
    out_rate, in_rate = device.rates_of(tier)
    left = [each for each in spans if trace.storages.death_op[each] >= trace.op_count]
    if not left or min(out_rate, in_rate) <= 0:
        return None
    sizes = trace.storages.size_bytes
    by_size = sorted(left, key=lambda storage: -sizes[storage])
    least = least_of_the_largest([sizes[each] for each in by_size], share)
    gone = {storage: found for storage, found in spans.items() if sizes[storage] >= least}
    largest = [storage for storage in by_size if storage in gone]
    total = sum(sizes[each] for each in largest)
    return _changed(trace, gone, _copies_ms(trace, gone, device, tier)), Away(least, len(largest), total)


def least_of_the_largest(sizes: Sequence[int], share: float) -> int:
    """The least of the largest that together have `share` of all. `sizes`: the largest first, one at least."""
    wanted, so_far = share * sum(sizes), itertools.accumulate(sizes)
    return next((size for size, had in zip(sizes, so_far, strict=True) if had >= wanted), sizes[-1])


def _spans(trace: Trace) -> dict[int, list[range]]:
    """Storage -> the steps in which it is there. Of those that are there before the iteration or come up in a step, and are there after it or
    go in a step. Who reads any of an optimizer's state elsewhere finds all of it back: then none of that leaves."""
    found: defaultdict[int, list[range]] = defaultdict(list)
    of_step: list[set[int]] = []
    for step in whole_steps(trace):
        span = range(step.begin_op, step.end_op)
        of_step.append({*step.state, *_replaced(trace, step, found)})
        for storage in of_step[-1]:
            found[storage].append(span)
    looked_at = {each for op, each in _uses(trace, found) if not any(op in span for span in found[each])}
    for each in of_step:
        if looked_at.intersection(each):
            looked_at.update(each)
    storages, n = trace.storages, trace.op_count
    return {
        storage: spans
        for storage, spans in found.items()
        if storage not in looked_at
        and (storages.birth_op[storage] < 0 or storages.birth_op[storage] in spans[0])
        and (storages.death_op[storage] >= n or storages.death_op[storage] in spans[-1])
    }


def _replaced(trace: Trace, step: Step, known: Mapping[int, object]) -> list[int]:
    """Storages that were state until `step` put as large ones in their place, which it made (`state["previous"] = gradient.clone()`). Of
    those that were made before the iteration nobody could note that they are state and nothing else holds them: they are taken for what
    the new ones are."""
    storages, span = trace.storages, range(step.begin_op, step.end_op)
    new = Counter(storages.size_bytes[each] for each in step.state if storages.birth_op[each] in span)
    found = []
    for storage in range(len(storages.size_bytes)) if new else ():
        size, born = storages.size_bytes[storage], storages.birth_op[storage]
        is_state = storage in known if born >= 0 else storages.category[storage] == _STATE
        if is_state and storages.death_op[storage] in span and new[size] > 0:
            new[size] -= 1
            found.append(storage)
    return found


def _uses(trace: Trace, storages: Iterable[int]) -> list[tuple[int, int]]:
    """(op, storage) of each read and write of those."""
    wanted = set(storages)
    if not wanted:
        return []
    pairs = [(op, each) for op in range(trace.op_count) for each in storages_of(trace, [op]) & wanted]
    return [*pairs, *((-1, each) for each in wanted.intersection(trace.slots.storage))]


def storages_of(trace: Trace, ops: Iterable[int]) -> set[int]:
    """Those that `ops` read or write."""
    of_value = trace.values.storage
    return {of_value[v] for op in ops for v in (*trace.ops.reads.row(op), *trace.ops.writes.row(op))}


def _copies_ms(trace: Trace, gone: dict[int, list[range]], device: Device, tier: Tier) -> dict[int, float]:
    """First op of a step -> what bringing its state back, and sending it away, takes there. Nothing computes meanwhile."""
    out_rate, in_rate = device.rates_of(tier)
    own_ms = TENSOR_MS * pace_of(trace)
    found: defaultdict[int, float] = defaultdict(float)
    for storage, spans in gone.items():
        size = trace.storages.size_bytes[storage]
        for span in spans:
            comes, leaves = _moves_at(trace, storage, span)
            found[span.start] += comes * 1000 * size / in_rate + leaves * (1000 * size / out_rate + own_ms)
    return found


def _moves_at(trace: Trace, storage: int, span: range) -> tuple[bool, bool]:
    """Does it come back for that step, and leave after it?"""
    return trace.storages.birth_op[storage] not in span, trace.storages.death_op[storage] not in span


def _changed(trace: Trace, gone: dict[int, list[range]], added_ms: dict[int, float]) -> Trace:
    ops, n, storages = trace.ops, trace.op_count, trace.storages
    less = np.zeros(n + 1, dtype=np.int64)
    for storage, spans in gone.items():
        size = storages.size_bytes[storage]
        less[0] += size * (storages.birth_op[storage] < 0)
        for span in spans:
            comes, leaves = _moves_at(trace, storage, span)
            less[span.start] -= size * comes
            less[span.stop] += size * leaves
    absent = np.cumsum(less)[:n]
    live = [int(at - missing) for at, missing in zip(ops.live_bytes, absent, strict=True)]
    time_us = [*ops.time_us]
    for op, ms in added_ms.items():
        time_us[min(op, n - 1)] += 1000 * ms
    total = sum(storages.size_bytes[each] for each in gone if storages.birth_op[each] < 0)
    high = [at + more for at, more in zip(live, ops.extra_bytes, strict=True)]
    base, outside = trace.base_bytes - total, max(0, trace.outside_peak_bytes - total)
    sizes = [*storages.size_bytes]
    if absent[int(np.argmax(high))]:  # where the peak is in a step, that is what holds it
        for storage in gone:
            sizes[storage] = 0
    return msgspec.structs.replace(
        trace,
        ops=msgspec.structs.replace(ops, live_bytes=live, time_us=time_us),
        storages=msgspec.structs.replace(storages, size_bytes=sizes),
        base_bytes=base,
        peak_bytes=max([base, outside, *high]),
        step_ms=trace.step_ms + sum(added_ms.values()),
        updates=None,
    )
