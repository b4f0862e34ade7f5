"""The budget to try first on a profile: as in `Problem.floor`, but from the columns alone, so that it costs no planning."""

from __future__ import annotations

import math

import numpy as np

from memopt.trace import Trace

_USUAL = 0.8
"""Of the plain peak: no lower budget is the first that a person is told to try."""
_OF_THE_WAY = 0.5
"""From the plain peak down to the floor."""
_HARDLY = 0.97
"""A budget above this share of the peak is not worth a number."""


def first_budget(trace: Trace) -> str:
    """`80%`, more where the floor is near that, or `min` where hardly anything can be saved."""
    if not trace.op_count or not trace.peak_bytes:
        return "min"
    share = floor_bytes(trace) / trace.peak_bytes
    share = max(_USUAL, 1 - _OF_THE_WAY * (1 - share))
    return f"{math.ceil(100 * share)}%" if share <= _HARDLY else "min"


def floor_bytes(trace: Trace) -> int:
    """The most that is there at some op when every saved tensor is away from its last use in forward to its first in backward."""
    ops, slots, held = trace.ops, trace.slots, trace.storages.only_saved_from
    low = np.array(ops.live_bytes, dtype=np.int64) + np.array(ops.extra_bytes, dtype=np.int64)
    back: dict[int, int] = {}
    for slot, storage in enumerate(slots.storage):
        first = min(slots.unpacks.row(slot), default=trace.op_count)
        back[storage] = min(back.get(storage, first), first)
    change = np.zeros(trace.op_count + 1, dtype=np.int64)
    for storage, first in back.items():
        if held[storage] >= 0 and held[storage] + 1 < first < trace.op_count:
            change[held[storage] + 1] -= trace.storages.size_bytes[storage]
            change[first] += trace.storages.size_bytes[storage]
    return max(0, int((low + np.cumsum(change)[:-1]).max()))
