"""Copies to the host and back, hidden behind compute: which tensors leave, and when both lanes have time for them.

A swap is a tensor and the first run that needs it back. Everything else follows from the runs: it leaves after its last use
before that run, on the out lane in order of those uses; it comes back as late as the in lane allows (scheduled backwards from the
needs). Between the end of the way out and the start of the way back its bytes are lent to the plan as `credit`.
No run ever waits for a swap that is scheduled here; what does not fit in the lanes gets no credit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from memopt.advisors.graph import Graph
from memopt.advisors.graph_lives import EMPTY
from memopt.advisors.graph_runs import frees_after
from memopt.advisors.graph_state import RunState
from memopt.advisors.schedule import FREE, IN, OUT, RUN, Step

MARGIN_MS = 1e-6
"""Copies end this much later in the plan than computed, so that rounding in another judge cannot break it."""

Swap = tuple[int, int]
"""Tensor, and the op whose first run needs it back (`op_count`: the end)."""


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

    def clock(self, state: RunState) -> tuple[list[int], list[float]]:
        """Slots of all runs and the end; when each starts."""
        ops = np.array(state.slot_op, dtype=np.int64)
        slots = np.flatnonzero(ops != EMPTY)
        starts = np.zeros(len(slots) + 1)
        np.cumsum(self.graph.op_ms[ops[slots]], out=starts[1:])
        return [*slots.tolist(), state.end], starts.tolist()

    def trips(self, state: RunState) -> list[Trip]:
        """The swaps that both lanes have time for."""
        slots, starts = self.clock(state)
        wanted: list[tuple[int, int, int]] = []
        for tensor, op in self.swaps:
            need = state.runs_at[op][0] if op < self.graph.op_count else state.end
            uses = state.uses[tensor]
            index = bisect_left(uses, need)
            made = state.runs_at[state.maker[tensor]]
            position = bisect_left(made, need)
            if not position or index == len(uses) or uses[index] != need:
                continue
            leave = made[position - 1]
            if index and uses[index - 1] > leave:
                leave = uses[index - 1]
            wanted.append((bisect_left(slots, leave), bisect_left(slots, need), tensor))
        wanted.sort()
        ends: dict[int, tuple[float, int]] = {}
        free = 0.0
        for number, (leave, need, tensor) in enumerate(wanted):
            end = max(starts[leave + 1], free) + self.out_ms[tensor]
            if end < starts[need] - self.in_ms[tensor]:
                free = end
                ends[number] = (end, bisect_left(starts, end + MARGIN_MS))
        return self._way_back(slots, starts, wanted, ends)

    def _way_back(
        self,
        slots: list[int],
        starts: list[float],
        wanted: list[tuple[int, int, int]],
        ends: dict[int, tuple[float, int]],
    ) -> list[Trip]:
        found: list[Trip] = []
        deadline = starts[-1]
        for number in sorted(ends, key=lambda number: (wanted[number][1], number), reverse=True):
            leave, need, tensor = wanted[number]
            end, gone = ends[number]
            start = min(starts[need], deadline) - self.in_ms[tensor]
            if start < end + MARGIN_MS:
                continue
            back = min(bisect_right(starts, start - MARGIN_MS), len(slots) - 1) - 1
            if back > gone:
                deadline = start
                found.append(Trip(tensor, slots[leave], slots[gone], slots[back], slots[need]))
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
