"""A recorded iteration as it would run with its frozen weights streamed: away in a tier, on the device while something uses them.

That is during the module call that reads one, and, in backward, during the node that asks for it or whose op reads it, as
`enforcers.weights.streamed` has it. With `ahead` the next one is on its way from when the one before is asked for, so that its copy
passes beside what computes meanwhile. Storages, slots and ops keep their numbers. An op that is run again in backward brings its weight
once more, and the next one: what forward waits and holds for it is told of the op itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from memopt.device import Device
from memopt.estimators.simulator.costs import pace_of, staging_ms
from memopt.estimators.simulator.state_away import least_of_the_largest
from memopt.estimators.simulator.weights_away import REASONS_TO_STAY
from memopt.plan import Tier
from memopt.trace import PHASES, Trace
from memopt.workspaces import workspaces_of

TENSOR_MS = 0.05
"""Per copy: looked up, emptied and filled."""
MODE_MS = 0.009
"""Per op: who reads weights is seen op by op, in the step and wherever else."""
_BACKWARD = PHASES.index("backward")


@dataclass(frozen=True, slots=True)
class Streamed:
    """What is streamed, and the run as it is."""

    tier: Tier
    least_bytes: int
    ahead: bool
    count: int
    size_bytes: int
    plain_peak_bytes: int
    plain_step_ms: float
    workspaces: dict[str, list[tuple[int, int]]]
    """As `workspaces_of` has them: in the changed trace weights that ops bring about stand among them."""
    cost_ms: float


@dataclass(frozen=True, slots=True)
class _Use:
    """A weight is on the device from the op `begin` to the op `end`."""

    begin: int
    end: int
    storage: int


def streamable(trace: Trace) -> list[int]:
    """Storages of the frozen weights that may be streamed."""
    if trace.partial or any(map(trace.facts.get, REASONS_TO_STAY)):
        return []
    storages, n = trace.storages, trace.op_count
    stay = {trace.values.storage[value] for value in trace.ops.writes.items} | set(trace.held_beside)
    return [
        each
        for each in trace.frozen
        if each not in stay and storages.birth_op[each] < 0 and storages.death_op[each] >= n
    ]


def least_sizes(trace: Trace, shares: Iterable[float]) -> list[int]:
    """For each of `shares`, of all bytes that may be streamed: the least size of the largest weights that have so much. Each once."""
    sizes = sorted((trace.storages.size_bytes[each] for each in streamable(trace)), reverse=True)
    return list(dict.fromkeys(least_of_the_largest(sizes, share) for share in shares)) if sizes else []


def weights_streamed(
    trace: Trace, tier: Tier, device: Device, least_bytes: int, *, ahead: bool
) -> tuple[Trace, Streamed] | None:
    """The trace with all frozen weights of `least_bytes` or more streamed; None where there are none, or the device has no such tier."""
    sizes = trace.storages.size_bytes
    streamed = {each for each in streamable(trace) if sizes[each] >= max(1, least_bytes)}
    _, in_rate = device.rates_of(tier)
    if not streamed or in_rate <= 0 or not trace.op_count:
        return None
    uses = _uses(trace, streamed)
    present, copies = _present(uses, ahead=ahead)
    waits_ms = _waits_ms(trace, copies, device, tier, ahead=ahead)
    changed, cost_ms = _changed(
        trace, streamed, present, _asked(trace, streamed, uses, ahead=ahead), waits_ms
    )
    total = sum(sizes[each] for each in streamed)
    return changed, Streamed(
        tier,
        least_bytes,
        ahead,
        len(streamed),
        total,
        trace.peak_bytes,
        trace.step_ms,
        workspaces_of(trace),
        cost_ms,
    )


# --- when they are used


def _uses(trace: Trace, streamed: set[int]) -> list[_Use]:
    """In the order in which they begin, those of one weight that touch taken as one."""
    ops, values, n = trace.ops, trace.values.storage, trace.op_count
    ends = _ends_of_runs(trace)
    begins = _begins_of_runs(ends)
    found: list[_Use] = []
    asked = _asked_for(trace, streamed, ends)
    found += asked
    covered: defaultdict[int, list[range]] = defaultdict(list)
    for use in asked:
        covered[use.storage].append(range(use.begin, use.end + 1))
    reads = [
        (op, storage)
        for op in range(n)
        for storage in sorted({values[value] for value in ops.reads.row(op)} & streamed)
    ]
    read_at = sorted({op for op, _ in reads})
    for op, storage in reads:
        if any(op in span for span in covered[storage]):
            continue
        if ops.phase[op] == _BACKWARD:  # another module call of a recomputation, or the next node
            later = bisect_right(read_at, op)
            following = read_at[later] - 1 if later < len(read_at) else n - 1
            found.append(_Use(op, min(ends[op], max(op, following)), storage))
        else:
            found.append(_Use(begins[op], ends[op], storage))
    return _joined(found)


def _asked_for(trace: Trace, streamed: set[int], ends: list[int]) -> list[_Use]:
    """By backward, of what it has saved: until the node has ended."""
    slots, n = trace.slots, trace.op_count
    return [
        _Use(op, ends[op], storage)
        for slot, storage in enumerate(slots.storage)
        if storage in streamed
        for op in slots.unpacks.row(slot)
        if op < n
    ]


def _ends_of_runs(trace: Trace) -> list[int]:
    """For each op the last one of those that follow one another in the same module call, or, in backward, the same node."""
    ops, n = trace.ops, trace.op_count
    ends = [*range(n)]
    for op in range(n - 2, -1, -1):
        if _place(trace, op) == _place(trace, op + 1) and ops.phase[op] == ops.phase[op + 1]:
            ends[op] = ends[op + 1]
    return ends


def _place(trace: Trace, op: int) -> tuple[int, int]:
    ops = trace.ops
    return (ops.forward_op[op], -1) if ops.phase[op] == _BACKWARD else (-1, ops.module[op])


def _begins_of_runs(ends: list[int]) -> list[int]:
    begins = [*range(len(ends))]
    for op in range(1, len(ends)):
        if ends[op] == ends[op - 1]:
            begins[op] = begins[op - 1]
    return begins


def _joined(uses: list[_Use]) -> list[_Use]:
    found: list[_Use] = []
    last: dict[int, int] = {}
    for use in sorted(uses, key=lambda each: (each.begin, each.storage)):
        at = last.get(use.storage)
        if at is not None and use.begin <= found[at].end + 1:
            found[at] = _Use(found[at].begin, max(found[at].end, use.end), use.storage)
            continue
        last[use.storage] = len(found)
        found.append(use)
    return found


def _present(uses: list[_Use], *, ahead: bool) -> tuple[list[_Use], list[tuple[int, _Use]]]:
    """When weights are on the device, on their way too; and the copies, each with the op at which it starts."""
    if not ahead:
        return uses, [(use.begin, use) for use in uses]
    present, copies = [], []
    there: dict[int, int] = {}
    before: _Use | None = None
    for use in uses:
        start = use.begin if before is None else before.begin
        if there.get(use.storage, -1) + 1 < start or use.storage not in there:
            copies.append((start, use))
        else:  # it is still there, and stays, as the next
            start = there[use.storage] + 1
        present.append(_Use(min(start, use.begin), use.end, use.storage))
        there[use.storage] = use.end
        before = use
    return present, copies


def _asked(trace: Trace, streamed: set[int], uses: list[_Use], *, ahead: bool) -> dict[int, set[int]]:
    """For each op before backward that reads weights these, and with `ahead` the one that is on its way meanwhile."""
    found = {}
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, use in enumerate(uses):
        places[use.storage].append(place)
    for op in range(trace.op_count):
        if trace.ops.phase[op] == _BACKWARD:
            continue
        read = {trace.values.storage[value] for value in trace.ops.reads.row(op)} & streamed
        if not read:
            continue
        begun = [bisect_right(places[each], op, key=lambda place: uses[place].begin) - 1 for each in read]
        last = max(places[each][row] for each, row in zip(read, begun, strict=True))
        coming = uses[last + 1 : last + 2] if ahead else []
        found[op] = read | {use.storage for use in coming}
    return found


def _waits_ms(
    trace: Trace, copies: list[tuple[int, _Use]], device: Device, tier: Tier, *, ahead: bool
) -> dict[int, float]:
    """Op -> how long it waits for its weight, what copying takes of the cores that compute included."""
    _, in_rate = device.rates_of(tier)
    starts_ms, now = [], 0.0
    for time_us in trace.ops.time_us:
        starts_ms.append(now)
        now += time_us / 1000
    found: defaultdict[int, float] = defaultdict(float)
    pace = pace_of(trace)
    lane = waited = 0.0
    for start, use in copies:
        size = trace.storages.size_bytes[use.storage]
        own_ms = staging_ms(size, device) + TENSOR_MS * pace
        took = 1000 * size / in_rate
        ends = max(lane, starts_ms[start] + waited) + took
        lane = ends
        wait = max(0.0, ends - (starts_ms[use.begin] + waited)) if ahead else took
        found[use.begin] += wait + own_ms
        waited += wait + own_ms
    return found


# --- the changed trace


def _changed(
    trace: Trace,
    streamed: set[int],
    present: list[_Use],
    asked: dict[int, set[int]],
    waits_ms: dict[int, float],
) -> tuple[Trace, float]:
    ops, n, storages = trace.ops, trace.op_count, trace.storages
    sizes = storages.size_bytes
    total = sum(sizes[each] for each in streamed)
    change = [0] * (n + 1)
    for use in present:
        change[use.begin] += sizes[use.storage]
        change[use.end + 1] -= sizes[use.storage]
    live, now = [], -total
    for op in range(n):
        now += change[op]
        live.append(ops.live_bytes[op] + now)
    extra, workspace = [*ops.extra_bytes], [*ops.workspace_bytes]
    for op, these in asked.items():
        own = sum(sizes[each] for each in these)
        live[op] -= own
        extra[op] += own
        workspace[op] += own
    seen_ms = MODE_MS * pace_of(trace)
    time_us = [time + 1000 * (waits_ms.get(op, 0.0) + seen_ms) for op, time in enumerate(ops.time_us)]
    high = [at + more for at, more in zip(live, extra, strict=True)]
    base, outside = trace.base_bytes - total, max(0, trace.outside_peak_bytes - total)
    cost_ms = sum(time_us) / 1000 - sum(ops.time_us) / 1000
    changed = msgspec.structs.replace(
        trace,
        ops=msgspec.structs.replace(
            ops, live_bytes=live, extra_bytes=extra, workspace_bytes=workspace, time_us=time_us
        ),
        storages=msgspec.structs.replace(
            storages, size_bytes=[0 if each in streamed else size for each, size in enumerate(sizes)]
        ),
        base_bytes=base,
        peak_bytes=max([base, outside, *high]),
        step_ms=trace.step_ms + cost_ms,
        frozen=[],
    )
    return changed, cost_ms
