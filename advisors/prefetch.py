"""When each swapped storage comes back: the latest unpack early enough that the copy hides, and late enough that the bytes fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memopt.advisors.problem import Decisions, Problem

_SLACK = 1.25
"""A copy is given this much longer than the link's rate says."""


def unpack_ops(problem: Problem) -> list[int]:
    """Ops before which something is unpacked, in order: the only moments at which a swap-in can be started."""
    slots = problem.view.trace.slots
    return sorted({op for op in slots.unpacks.items if op < problem.view.n})


def place_prefetches(problem: Problem, decisions: Decisions, *, earliest: bool = False) -> Decisions:
    """`decisions` with `prefetch_op` set for every swap, on one FIFO lane, backwards from the last use.

    `earliest`: as far ahead as the bytes fit, however short the copy is.
    """
    view = problem.view
    swaps = [storage for storage, decision in decisions.items() if decision.kind == "swap"]
    if not swaps:
        return decisions
    placed = {s: replace(d, prefetch_op=-1) if d.kind == "swap" else d for s, d in decisions.items()}
    timeline = problem.run(placed)
    times, high = timeline.start_ms, timeline.high_bytes.copy()
    triggers = np.array(unpack_ops(problem))
    lane_ms = float("inf")
    for storage in sorted(swaps, key=lambda s: -view.saved[s].first_use):
        saved, decision = view.saved[storage], placed[storage]
        copy_ms = problem.simulator.copy_ms(saved.size_bytes, decision, out=False)
        end_ms = min(lane_ms, float(times[saved.first_use]))
        wanted = -1.0 if earliest else end_ms - _SLACK * copy_ms
        trigger = _fitting(
            problem, triggers, times, high, saved.gone_after, saved.first_use, saved.size_bytes, wanted
        )
        lane_ms = min(end_ms - copy_ms, float(times[trigger]) if trigger >= 0 else end_ms)
        if trigger >= 0:
            placed[storage] = replace(decision, prefetch_op=trigger)
            high[trigger : saved.first_use] += saved.size_bytes
    return placed


def _fitting(
    problem: Problem,
    triggers: np.ndarray[tuple[int], np.dtype[np.int64]],
    times: np.ndarray[tuple[int], np.dtype[np.float64]],
    high: np.ndarray[tuple[int], np.dtype[np.int64]],
    gone_after: int,
    use: int,
    size_bytes: int,
    wanted_ms: float,
) -> int:
    """The latest trigger at or before `wanted_ms` whose bytes fit until `use`, else the first later one; -1: on demand."""
    inside = triggers[(triggers > gone_after) & (triggers < use)]
    if not inside.size:
        return -1
    room = problem.target_bytes - size_bytes
    full = np.flatnonzero(high[inside[0] : use] > room)
    earliest = int(inside[0]) + int(full[-1]) + 1 if full.size else int(inside[0])
    early = inside[times[inside] <= wanted_ms]
    best = int(early[-1]) if early.size else int(inside[0])
    if best >= earliest:
        return best
    later = inside[inside >= earliest]
    return int(later[0]) if later.size else -1
