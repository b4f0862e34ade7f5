"""A recorded iteration as one that saves more would be: a longer text, a larger picture, more steps of a solver's batch.

For scripts whose iterations differ in size, so that a plan may be made for more than the recorded one. What is computed from inputs grows,
and so do workspaces beside it; parameters, their gradients and state do not. How much is told by the elements that autograd saves, weights
among them, which stay; bytes that follow the square of a length (attention matrices) grow like the others here. Times stay as recorded.
"""

from __future__ import annotations

import math

import msgspec

from memopt.estimators.elsewhere.batch import scaled_by, sized_by_inputs
from memopt.estimators.elsewhere.recording import amounts_of, held_bytes
from memopt.trace import CATEGORIES, Trace

_WEIGHTS = frozenset(CATEGORIES.index(name) for name in ("parameter", "buffer"))
PARTS = 1000
"""Of which a factor is a whole number."""


def grown(trace: Trace, factor: float) -> Trace:
    """`trace` as of an iteration that saves `factor` times as many elements; a factor of 1 or less changes nothing."""
    parts = round(_of_activations(trace, factor) * PARTS)
    if parts <= PARTS:
        return trace
    amounts = scaled_by(trace, amounts_of(trace), sized_by_inputs(trace), PARTS, parts)
    held, born = held_bytes(trace, amounts.storage_bytes)
    live = [at + more for at, more in zip(held, amounts.unseen_bytes, strict=True)]
    extra = [new + work for new, work in zip(born, amounts.workspace_bytes, strict=True)]
    first = sum(s for s, b in zip(amounts.storage_bytes, trace.storages.birth_op, strict=True) if b < 0)
    base = first + amounts.before_bytes
    return msgspec.structs.replace(
        trace,
        ops=msgspec.structs.replace(
            trace.ops, live_bytes=live, extra_bytes=extra, workspace_bytes=list(amounts.workspace_bytes)
        ),
        storages=msgspec.structs.replace(trace.storages, size_bytes=amounts.storage_bytes),
        base_bytes=base,
        peak_bytes=max([base, *(at + more for at, more in zip(live, extra, strict=True))]),
    )


def _of_activations(trace: Trace, factor: float) -> float:
    """By how much what is no weight grows."""
    slots, kinds = trace.slots, trace.storages.category
    elements = [math.prod(slots.shape.row(slot)) for slot in range(len(slots.storage))]
    growing = sum(
        size for size, storage in zip(elements, slots.storage, strict=True) if kinds[storage] not in _WEIGHTS
    )
    return 1 + (factor - 1) * sum(elements) / growing if growing else 1.0
