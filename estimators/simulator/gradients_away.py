"""A recorded iteration as it would run with gradients in a tier from the moment they are whole until they are cleared.

As the enforcer does it: a gradient leaves when the next one is whole, or sooner, when autograd next asks for a saved tensor; at most one is
on its way, and is waited for when the next one leaves, or autograd asks again; an op that reads one outside the step brings it back, and it
stays until the step is over; the step in pieces holds a piece of them at a time. Storages, slots and ops keep their numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from memopt.device import Device
from memopt.estimators.simulator.costs import handling_ms, pace_of
from memopt.plan import Tier
from memopt.trace import PHASES, Trace
from memopt.updates import Updates

LEAST_BYTES = 64 * 1024
"""Smaller gradients stay."""
_BACKWARD = PHASES.index("backward")
_PAGE_BYTES = 4096
"""A part that is read begins where a page does."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A gradient, and the ops before which it leaves and comes back."""

    size_bytes: int
    whole: int
    leaves: int
    back: int
    """Where nobody reads it but the step: when it is cleared, or the iteration ends."""
    for_good: bool
    """Nobody asks for it but the step."""


def why_not(trace: Trace) -> str:
    """Why gradients cannot be in a tier; empty when they can."""
    updates = trace.updates
    if updates is None or updates.gradients_stay is None:
        return "the profile does not tell when gradients are whole"
    return updates.gradients_stay or ("the recording is not whole" if trace.partial else "")


def gradients_away(
    trace: Trace, updates: Updates, tier: Tier, device: Device, piece_bytes: int
) -> tuple[Trace, int, bool] | None:
    """The trace without them, how many bytes leave, and whether they are still there when an iteration ends; `updates` as recorded, `trace`
    perhaps with its step in pieces. None where nothing leaves."""
    gone = _gone(trace, updates)
    if not gone:
        return None
    old = _old_ones(trace, updates)
    n, step = trace.op_count, range(updates.begin_op, updates.end_op)
    change = [0] * (n + 2)
    for each in gone:
        change[each.leaves] -= each.size_bytes
        change[max(each.leaves, each.back)] += each.size_bytes
    for size, back in old:
        change[0] -= size
        change[min(back, n)] += size
    less = list(itertools.accumulate(change))
    read_in_step = [each.size_bytes for each in gone if each.for_good and each.leaves < updates.end_op]
    window = min(piece_bytes + _PAGE_BYTES, sum(read_in_step))
    ops, pace = trace.ops, pace_of(trace)
    live = [at + less[op] + (window if op in step else 0) for op, at in enumerate(ops.live_bytes)]
    time_us = [*ops.time_us]
    for each in gone:
        out_ms, in_ms = _copies_ms(each.size_bytes, tier, device, pace)
        time_us[min(each.whole, n - 1)] += 1000 * out_ms
        time_us[min(each.back if not each.for_good else step.start, n - 1)] += 1000 * in_ms
    added_ms = sum(time_us) / 1000 - sum(ops.time_us) / 1000
    base = trace.base_bytes - sum(size for size, _ in old)
    high = [at + more for at, more in zip(live, ops.extra_bytes, strict=True)]
    changed = msgspec.structs.replace(
        trace,
        ops=msgspec.structs.replace(ops, live_bytes=live, time_us=time_us),
        base_bytes=base,
        peak_bytes=max([base, trace.outside_peak_bytes, *high]),
        step_ms=trace.step_ms + added_ms,
        updates=None,
    )
    return changed, sum(each.size_bytes for each in gone), bool(updates.old_gradients)


def _gone(trace: Trace, updates: Updates) -> list[Gone]:
    storages, n = trace.storages, trace.op_count
    rows = sorted(zip(updates.ready_before, updates.gradient, updates.parameter, strict=True))
    rows = [row for row in rows if _may_leave(trace, row[1], row[2])]
    uses = _uses(trace, (gradient for _, gradient, _ in rows))
    last = max((op for op, phase in enumerate(trace.ops.phase) if phase == _BACKWARD), default=-1)
    found = []
    for (whole, gradient, _), gone_by in zip(rows, _departures(trace, [row[0] for row in rows]), strict=True):
        leaves = max(gone_by, whole + 1 if whole <= last else whole)  # backward ends when all have left
        read = _first_use(uses[gradient], whole, updates)
        end = min(storages.death_op[gradient] + 1, n)
        for_good = read is None
        back = end if read is None else read
        if read is not None and read < updates.begin_op and updates.old_gradients:
            found.append(Gone(storages.size_bytes[gradient], whole, updates.end_op, end, for_good=True))
        found.append(Gone(storages.size_bytes[gradient], whole, leaves, back, for_good))
    return found


def _departures(trace: Trace, wholes: list[int]) -> list[int]:
    """For each gradient the op before which its bytes are off the device, from those before which they are whole, in order."""
    if not wholes:
        return []
    asked = [(op, len(wholes)) for op in trace.slots.unpacks.items]
    events = sorted([*((op, place) for place, op in enumerate(wholes)), *asked])
    found = wholes[-1:] * len(wholes)
    fresh: list[int] = []
    under_way = -1

    def send(op: int) -> None:
        nonlocal under_way
        wait(op)
        under_way = fresh.pop(0)

    def wait(op: int) -> None:
        nonlocal under_way
        if under_way >= 0:
            found[under_way], under_way = op, -1

    for op, place in events:
        if place < len(wholes):
            fresh.append(place)
            while len(fresh) > 1:
                send(op)
        elif fresh:
            while fresh:
                send(op)
        else:
            wait(op)
    return found


def _may_leave(trace: Trace, gradient: int, parameter: int) -> bool:
    sizes, births = trace.storages.size_bytes, trace.storages.birth_op
    return sizes[gradient] >= LEAST_BYTES and sizes[gradient] == sizes[parameter] and births[gradient] >= 0


def _first_use(uses: list[int], whole: int, updates: Updates) -> int | None:
    """The first op outside the step that reads or writes it once it is whole."""
    return next((op for op in uses if whole <= op < updates.begin_op or op >= updates.end_op), None)


def _uses(trace: Trace, storages: Iterable[int]) -> dict[int, list[int]]:
    """Storage -> ops that read or write it, in order."""
    found: dict[int, list[int]] = {storage: [] for storage in storages}
    for op in range(trace.op_count):
        values = (*trace.ops.reads.row(op), *trace.ops.writes.row(op))
        for storage in {trace.values.storage[value] for value in values} & found.keys():
            found[storage].append(op)
    return found


def _old_ones(trace: Trace, updates: Updates) -> list[tuple[int, int]]:
    """(bytes, op before which it is back, or no more there) of each gradient that the iteration before has left behind."""
    storages, found = trace.storages, []
    uses = _uses(trace, updates.old_gradients)
    for gradient in updates.old_gradients:
        size = storages.size_bytes[gradient]
        if size < LEAST_BYTES or storages.birth_op[gradient] >= 0:
            continue
        first = next(iter(uses[gradient]), trace.op_count)
        found.append((size, min(first, storages.death_op[gradient] + 1)))
    return found


def _copies_ms(size_bytes: int, tier: Tier, device: Device, pace: float) -> tuple[float, float]:
    """Out and back, as if nothing hid them; on a CPU with what the tier's threads take of the cores, on a GPU what the host takes to queue
    them: the hook of the gradient, and one copy."""
    out_rate, in_rate = device.rates_of(tier)
    beside = handling_ms(size_bytes, device, 2 * pace)
    return (
        max(beside, 1000 * size_bytes / out_rate),
        max(beside, 1000 * size_bytes / in_rate),
    )
