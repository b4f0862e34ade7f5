"""A recorded iteration as it would run where the formulas of backward write into the gradients that they use up.

The ops stay where they are. One whose result goes into a gradient that dies with it takes no memory of its own (`IN_PLACE` marks those
that could, see `instrument.gradients_in_place`). A dispatch mode has to see every op of backward for that, which takes a moment each.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memopt.estimators.simulator.costs import pace_of
from memopt.trace import IN_PLACE, PHASES, Trace

MODE_MS = 0.015
"""Per op of backward: the dispatch mode that sees it (12.6 to 13.3 us on one core, torch 2.13), and the look for nodes that ask for modes
(0.9 to 2.2 us each)."""
LOOK_MS = 0.012
"""Per op that is written over its gradient: the look at who holds that (11.6 to 12.1 us)."""
_LEAST = 1 / 2000
"""Share of the peak below which a result is not worth that look."""
_BACKWARD = PHASES.index("backward")


@dataclass(frozen=True, slots=True)
class InPlace:
    """Which ops write into their gradients, and the run as it is."""

    made: tuple[tuple[int, int], ...]
    """(op, bytes that it makes)."""
    least_bytes: int
    """Of what an op makes."""
    plain_peak_bytes: int
    plain_step_ms: float
    cost_ms: float


def why_not(trace: Trace) -> str:
    """Why gradients cannot be written over; empty when they can."""
    if trace.partial:
        return "the recording is not whole"
    if trace.device.kind != "cpu":
        return "the same bits have been shown on a CPU only"
    if trace.facts.get("create_graph", 0):
        return "backward makes a graph of its own"
    if not any(flags & IN_PLACE for flags in trace.ops.flags):
        return "no op of backward uses up a gradient of the size of its result"
    return ""


def in_place(trace: Trace) -> tuple[Trace, InPlace] | None:
    """The changed trace, and what was changed; None where nothing can be."""
    if why_not(trace):
        return None
    ops, pace = trace.ops, pace_of(trace)
    least_bytes = int(trace.peak_bytes * _LEAST)
    time_us = [
        time + 1000 * pace * MODE_MS * (phase == _BACKWARD)
        for time, phase in zip(ops.time_us, ops.phase, strict=True)
    ]
    extra, workspace = [*ops.extra_bytes], [*ops.workspace_bytes]
    made = []
    for op, flags in enumerate(ops.flags):
        size = _made_bytes(trace, op) if flags & IN_PLACE else 0
        if size >= max(1, least_bytes):
            extra[op] = max(0, extra[op] - size)
            workspace[op] = min(workspace[op], extra[op])
            time_us[op] += 1000 * pace * LOOK_MS
            made.append((op, size))
    if not made:
        return None
    high = [at + more for at, more in zip(ops.live_bytes, extra, strict=True)]
    changed = msgspec.structs.replace(
        trace,
        ops=msgspec.structs.replace(ops, extra_bytes=extra, workspace_bytes=workspace, time_us=time_us),
        peak_bytes=max([trace.base_bytes, trace.outside_peak_bytes, *high]),
        step_ms=trace.step_ms + sum(time_us) / 1000 - sum(ops.time_us) / 1000,
    )
    return changed, InPlace(
        tuple(made), least_bytes, trace.peak_bytes, trace.step_ms, changed.step_ms - trace.step_ms
    )


def _made_bytes(trace: Trace, op: int) -> int:
    """What it makes, where a storage of that size that was made in backward dies with it."""
    storages = trace.storages
    made = {trace.values.storage[value] for value in trace.ops.writes.row(op)}
    sizes = [storages.size_bytes[each] for each in made if storages.birth_op[each] == op]
    used_up = [
        storages.size_bytes[each]
        for each in {trace.values.storage[value] for value in trace.ops.reads.row(op)}
        if storages.death_op[each] == op and storages.birth_op[each] >= 0
    ]
    return sizes[0] if len(sizes) == 1 and sizes[0] in used_up else 0
