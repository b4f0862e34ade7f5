"""Weights that may be away: parameters and buffers between the last op of forward that reads them and the first of backward that reads or
writes them; where backward does neither, until it is over. So for each backward call of the iteration, with what has run since the one before
(the micro-batches of an accumulated step, a discriminator and its generator). They are whole again whenever no backward is ahead: at the
step, in evaluation, in a checkpoint.

ZeRO-Infinity (Rajbhandari et al., SC 2021) has all parameters elsewhere between their uses, in an engine of its own. Not done here:
from a weight's last use in backward to the step, and past a backward call whose forward has not read them.
"""

from __future__ import annotations

from memopt.estimators.simulator.saved import Absence, Saved
from memopt.trace import CATEGORIES, PHASES, Trace

LEAST_BYTES = 1 << 20
"""Smaller weights stay."""
_WEIGHTS = frozenset(CATEGORIES.index(name) for name in ("parameter", "buffer"))
REASONS_TO_STAY = ("create_graph", "grad_calls", "other_threads", "several_processes", "compiled")
"""Facts with which the run lets no weight leave, streamed or not."""
_BACKWARD = PHASES.index("backward")
_BEFORE_BACKWARD = frozenset(PHASES.index(name) for name in ("forward", "other"))


def weights_away(
    trace: Trace, value_times: dict[int, list[tuple[int, int]]], reads: list[list[int]]
) -> dict[int, Saved]:
    """Storage -> when it may be away, in the terms of a saved tensor; it is there for good from its last use on. `value_times`, `reads`: as
    `TraceView` has them."""
    facts = trace.facts
    if any(map(facts.get, REASONS_TO_STAY)):
        return {}
    held = set(trace.held_beside)
    large = [
        each for each in range(trace.storage_count) if each not in held and _is_large_weight(trace, each)
    ]
    calls = _backward_calls(trace) if large else []
    if not calls or len(calls) != facts.get("backward_calls", 0):
        return {}
    values = {value: storage for storage in large for _, value in value_times[storage]}
    uses = _uses(trace, values, reads)
    found = {}
    for storage in large:
        writes = [op for op, _ in value_times[storage] if op >= 0]
        spans = _absences(trace, calls, uses[storage], writes)
        if spans:
            found[storage] = _rest(trace, storage, value_times[storage][0][1], spans)
    return found


def _backward_calls(trace: Trace) -> list[range]:
    """The ops of each, those that follow one another at once taken as one."""
    found: list[range] = []
    for op, phase in enumerate(trace.ops.phase):
        if phase != _BACKWARD:
            continue
        if found and found[-1].stop == op:
            found[-1] = range(found[-1].start, op + 1)
        else:
            found.append(range(op, op + 1))
    return found


def _absences(trace: Trace, calls: list[range], uses: list[int], writes: list[int]) -> list[Absence]:
    """One for each backward call whose forward reads it."""
    found, begin, n = [], 0, trace.op_count
    for call in calls:
        forward = [op for op in (*uses, *writes) if begin <= op < call.start]
        later = [op for op in (*uses, *writes) if op >= call.start]
        back = min([*later, call.stop, n - 1])
        begin = call.stop
        if not forward:
            continue
        last = max(forward)
        if last not in writes and trace.ops.phase[last] in _BEFORE_BACKWARD and last + 1 < back:
            found.append(Absence(last, back))
    return found


def _is_large_weight(trace: Trace, storage: int) -> bool:
    storages = trace.storages
    return (
        storages.category[storage] in _WEIGHTS
        and storages.birth_op[storage] < 0
        and storages.death_op[storage] >= trace.op_count
        and storages.size_bytes[storage] >= LEAST_BYTES
        and trace.owner_of(storage) == "module"  # the run finds no others again
    )


def _uses(trace: Trace, weights: dict[int, int], reads: list[list[int]]) -> dict[int, list[int]]:
    """Storage -> ops that read it, or before which backward asks for what it has saved of it."""
    found: dict[int, list[int]] = {storage: [] for storage in weights.values()}
    for op, row in enumerate(reads):
        for value in row:
            if value in weights:
                found[weights[value]].append(op)
    for slot, storage in enumerate(trace.slots.storage):
        if storage in found:
            found[storage] += trace.slots.unpacks.row(slot)
    return found


def _rest(trace: Trace, storage: int, value: int, spans: list[Absence]) -> Saved:
    first, *again = spans
    return Saved(
        storage=storage,
        size_bytes=trace.storages.size_bytes[storage],
        slots=(),
        value=value,
        packed_op=first.gone_after,
        acted_op=first.gone_after,
        gone_after=first.gone_after,
        first_use=first.first_use,
        last_use=first.first_use,
        order=-1,
        release=trace.op_count,
        plain=True,
        is_weight=True,
        again=tuple(again),
    )
