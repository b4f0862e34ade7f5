"""Copies to and from the tiers: out in the order of packing, on one lane, then in by trigger, on another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from memopt.device import Device
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.sums import Sums
from memopt.estimators.simulator.trace_view import Floats, Saved, TraceView
from memopt.timeline import Interval


@dataclass(slots=True)
class Swaps:
    """What the copies add to an evaluation."""

    change: Sums[np.int64]
    """Bytes that appear or vanish before each op."""
    away_from: dict[int, int] = field(default_factory=dict)
    """Swapped storage -> first op before which its copy out is done."""
    intervals: list[Interval] = field(default_factory=list)
    stall_ms: float = 0.0


class SwapLanes:
    """The two lanes of one device."""

    def __init__(self, view: TraceView, device: Device) -> None:
        self.view, self.device = view, device

    def swap(
        self,
        decisions: Mapping[int, Decision],
        op_times: Floats,
        back_by: Mapping[int, int],
        *,
        lanes: bool = False,
    ) -> Swaps:
        """The copies of what is swapped. `op_times`: when each op starts, in ms; `back_by`: the op before which a storage is read ahead of
        its first consumer. `lanes`: list every copy."""
        swaps = Swaps(Sums(np.zeros(self.view.n + 2, dtype=np.int64)))
        saved_of = self.view.saved
        swapped = [(saved_of[storage], each) for storage, each in decisions.items() if each.kind == "swap"]
        if not swapped:
            return swaps
        times, last = op_times.tolist(), self.view.n - 1
        out_end: dict[int, float] = {}
        lane = 0.0
        for saved, decision in sorted(swapped, key=lambda pair: (pair[0].packed_op, pair[0].storage)):
            begin = max(lane, times[min(saved.packed_op + 1, last)])
            lane = out_end[saved.storage] = begin + self.copy_ms(saved.size_bytes, decision, out=True)
            if lanes:
                swaps.intervals.append(self._interval("swap_out", saved, begin, lane))
        lane = 0.0
        uses = [back_by.get(saved.storage, saved.first_use) for saved, _ in swapped]
        triggered = [
            (_trigger(use, decision), use, saved, decision)
            for use, (saved, decision) in zip(uses, swapped, strict=True)
        ]
        triggered.sort(key=lambda row: (*row[:2], row[2].order, row[2].storage))
        for trigger, use, saved, decision in triggered:
            end_ms = out_end[saved.storage]
            self._leave(swaps, saved, trigger, bisect_left(times, end_ms))
            if use > last:
                continue
            begin = max(lane, times[trigger] + swaps.stall_ms, end_ms)
            lane = begin + self.copy_ms(saved.size_bytes, decision, out=False)
            swaps.stall_ms += max(0.0, lane - (times[use] + swaps.stall_ms))
            if lanes:
                swaps.intervals.append(self._interval("swap_in", saved, begin, lane))
        return swaps

    def copy_ms(self, size_bytes: int, decision: Decision, *, out: bool) -> float:
        """Time of one copy on its lane; infinite where the device has no such link."""
        out_rate, in_rate = self.device.rates_of(decision.tier)
        rate = out_rate if out else in_rate
        return size_bytes / rate * 1000 if rate > 0 else float("inf")

    def _leave(self, swaps: Swaps, saved: Saved, trigger: int, copied: int) -> None:
        """The bytes go once they are `copied` and nobody else holds them, if that is before they come back."""
        gone = max(saved.gone_after + 1, copied)
        if gone < min(trigger, self.view.n):
            swaps.away_from[saved.storage] = gone
            swaps.change.extend(
                (gone, min(trigger, saved.release + 1)), (-saved.size_bytes, saved.size_bytes)
            )

    def _interval(self, lane: str, saved: Saved, begin: float, end: float) -> Interval:
        return Interval(lane, self.view.trace.storage_label(saved.storage), begin, end, saved.size_bytes)


def _trigger(use: int, decision: Decision) -> int:
    return min(decision.prefetch_op if decision.prefetch_op >= 0 else use, use)
