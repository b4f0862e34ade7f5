"""Weights that may be away: parameters and buffers between the last op of forward that reads them and the first of backward that reads or
writes them; where backward does neither, until it is over. They are whole again whenever no backward is ahead: at the step, in evaluation,
in a checkpoint.

ZeRO-Infinity (Rajbhandari et al., SC 2021) has all parameters elsewhere between their uses, in an engine of its own. Not done here:
from a weight's last use in backward to the step, weights that forward writes, and iterations with several backward calls.
"""

from __future__ import annotations

from memopt.estimators.simulator.saved import Saved
from memopt.trace import CATEGORIES, PHASES, Trace

LEAST_BYTES = 1 << 20
"""Smaller weights stay."""
_WEIGHTS = frozenset(CATEGORIES.index(name) for name in ("parameter", "buffer"))
_REASONS_TO_STAY = ("create_graph", "grad_calls", "other_threads")
_BACKWARD = PHASES.index("backward")
_BEFORE_BACKWARD = frozenset(PHASES.index(name) for name in ("forward", "other"))


def weights_away(
    trace: Trace, value_times: dict[int, list[tuple[int, int]]], reads: list[list[int]]
) -> dict[int, Saved]:
    """Storage -> when it may be away, in the terms of a saved tensor; it is there for good from `first_use` on. `value_times`, `reads`: as
    `TraceView` has them."""
    facts = trace.facts
    if facts.get("backward_calls", 0) != 1 or any(map(facts.get, _REASONS_TO_STAY)):
        return {}
    large = [storage for storage in range(trace.storage_count) if _is_large_weight(trace, storage)]
    backward = [op for op, phase in enumerate(trace.ops.phase) if phase == _BACKWARD] if large else []
    if not backward:
        return {}
    begins, over = backward[0], min(backward[-1] + 1, trace.op_count - 1)
    uses = _uses(trace, {value_times[storage][0][1]: storage for storage in large}, reads)
    found = {}
    for storage in large:
        (_, value), *rewritten = value_times[storage]
        forward = [op for op in uses[storage] if op < begins]
        later = [*(op for op in uses[storage] if op >= begins), *(op for op, _ in rewritten), over]
        if (
            forward
            and min(later) >= begins
            and all(trace.ops.phase[op] in _BEFORE_BACKWARD for op in forward)
        ):
            found[storage] = _rest(trace, storage, value, max(forward), min(later))
    return found


def _is_large_weight(trace: Trace, storage: int) -> bool:
    storages = trace.storages
    return (
        storages.category[storage] in _WEIGHTS
        and storages.birth_op[storage] < 0
        and storages.death_op[storage] >= trace.op_count
        and storages.size_bytes[storage] >= LEAST_BYTES
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


def _rest(trace: Trace, storage: int, value: int, gone_after: int, first_use: int) -> Saved:
    return Saved(
        storage=storage,
        size_bytes=trace.storages.size_bytes[storage],
        slots=(),
        value=value,
        packed_op=gone_after,
        acted_op=gone_after,
        gone_after=gone_after,
        first_use=first_use,
        last_use=first_use,
        order=-1,
        release=trace.op_count,
        plain=True,
        is_weight=True,
    )
