"""Copies to the host and back, hidden behind compute: which tensors leave, and when both lanes have time for them.

A swap is a tensor and the first run of an op at one end of the time that it is away: it leaves after that run, until whatever reads it
next, be it a rerun; or it is back for that run, since whatever read it before. Everything else follows from the runs: it leaves on
the out lane in order of those uses, and comes back as late as the in lane allows (scheduled backwards from the
needs). Between the end of the way out and the start of the way back its bytes are lent to the plan as `credit`.
No run ever waits for a swap that is scheduled here; what does not fit in the lanes gets no credit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from memopt.advisors.graphs.graph import FloatColumn, Graph
from memopt.advisors.graphs.lives import EMPTY
from memopt.advisors.graphs.runs import Swap, frees_after
from memopt.advisors.graphs.schedule import FREE, IN, OUT, RUN, Step
from memopt.advisors.graphs.search.run_state import RunState

MARGIN_MS = 1e-6
"""Copies end this much later in the plan than computed, so that rounding in another judge cannot break it."""


@dataclass(frozen=True, slots=True)
class Trip:
    """One swap in slots: leaves after the run at `leave`, is gone from `gone` on, comes back before the run at `back`."""

    tensor: int
    leave: int
    gone: int
    back: int
    need: int


class Lanes:
    """The set of swaps of a search, and their credit in its state."""

    def __init__(self, graph: Graph, out_gbps: float, in_gbps: float) -> None:
        self.graph = graph
        size = graph.tensor_bytes.astype(np.float64)
        self.out_ms: list[float] = (size / (out_gbps * 1e6) + MARGIN_MS).tolist()
        self.in_ms: list[float] = (size / (in_gbps * 1e6) + MARGIN_MS).tolist()
        self.swaps: set[Swap] = set()

    def trips(self, state: RunState) -> list[Trip]:
        """The swaps that both lanes have time for."""
        wanted = list({each for swap in self.swaps if (each := self._idle(state, swap))})
        if not wanted:
            return []
        wanted.sort()
        clock = np.zeros(state.end + 2)
        np.cumsum(state.slot_ms, out=clock[1:])
        columns = np.array(wanted, dtype=np.int64)
        ready: list[float] = clock[columns[:, 0] + 1].tolist()
        due: list[float] = clock[columns[:, 1]].tolist()
        out_ms, in_ms = self.out_ms, self.in_ms
        ends: dict[int, float] = {}
        free = 0.0
        for number, (_, _, tensor) in enumerate(wanted):
            end = max(ready[number], free) + out_ms[tensor]
            if end < due[number] - in_ms[tensor]:
                ends[number] = free = end
        return self._way_back(clock, wanted, due, ends)

    def _idle(self, state: RunState, swap: Swap) -> tuple[int, int, int] | None:
        """Slots of the runs before and after which the tensor is idle, and the tensor; None where it is made anew in between."""
        tensor, op, leaves = swap
        uses = state.uses[tensor]
        made = state.runs_at[state.maker[tensor]]
        slot = state.runs_at[op][0] if op < self.graph.op_count else state.end
        index = bisect_right(uses, slot) if leaves else bisect_left(uses, slot)
        if index == len(uses):
            return None
        need = uses[index]
        latest = bisect_left(made, need) - 1
        if leaves:
            return (slot, need, tensor) if made[latest] <= slot else None
        if latest < 0 or need != slot:
            return None
        return max(made[latest], uses[index - 1] if index else -1), need, tensor

    def _way_back(
        self,
        clock: FloatColumn,
        wanted: list[tuple[int, int, int]],
        due: list[float],
        ends: dict[int, float],
    ) -> list[Trip]:
        """Each comes back as late as it can; what would not be gone before that stays."""
        chosen = sorted(ends, key=lambda number: (wanted[number][1], number), reverse=True)
        gone = dict(
            zip(ends, clock.searchsorted(np.array([*ends.values()]) + MARGIN_MS).tolist(), strict=True)
        )
        found: list[Trip] = []
        deadline = float(clock[-1])
        for number in chosen:
            leave, need, tensor = wanted[number]
            start = min(due[number], deadline) - self.in_ms[tensor]
            if start < ends[number] + MARGIN_MS:
                continue
            back = int(clock.searchsorted(start - MARGIN_MS, side="right")) - 1
            if back > gone[number]:
                deadline = start
                found.append(Trip(tensor, leave, gone[number], back, need))
        return found

    def retime(self, state: RunState) -> None:
        """Recompute the credit of the state after runs or swaps changed."""
        change = np.zeros(state.end + 2, dtype=np.int64)
        size = state.size
        for trip in self.trips(state):
            change[trip.gone] += size[trip.tensor]
            change[trip.back] -= size[trip.tensor]
        fresh = np.cumsum(change[:-1])
        state.memory += state.credit - fresh
        state.credit = fresh

    def steps(self, state: RunState) -> list[Step]:
        """The schedule of the state, copies included."""
        leaving: dict[int, list[int]] = {}
        coming: dict[int, list[tuple[int, int]]] = {}
        for trip in sorted(self.trips(state), key=lambda trip: (trip.leave, trip.need, trip.tensor)):
            leaving.setdefault(trip.leave, []).append(trip.tensor)
            coming.setdefault(trip.back, []).append((trip.need, trip.tensor))
        slots = [slot for slot, op in enumerate(state.slot_op) if op != EMPTY]
        runs = [state.slot_op[slot] for slot in slots]
        steps: list[Step] = []
        for slot, op, dying in zip(slots, runs, frees_after(self.graph, runs), strict=True):
            steps.extend((IN, tensor) for _, tensor in sorted(coming.get(slot, ())))
            steps.append((RUN, op))
            steps.extend((FREE, tensor) for tensor in dying)
            steps.extend((OUT, tensor) for tensor in leaving.get(slot, ()))
        return steps
