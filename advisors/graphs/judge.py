"""The judge of schedules: replays the steps on three lanes exactly as `docs/formats.md` says.

Where the form leaves room (reading a tensor while its copy to the host is in flight, an `in` that exceeds the
budget), the judge is strict and calls the schedule invalid: another judge may be, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.advisors.graphs.graph import Graph
from memopt.advisors.graphs.schedule import FREE, IN, OUT, RUN, Step

UNBOUNDED = 2**62
"""No budget: above any sum of `MOST_BYTES_ALL`, and still inside 64 bits."""


class InvalidSchedule(Exception):
    """A step that breaks the rules. A planner that lets it reach a user has a bug."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a valid schedule costs."""

    peak_bytes: int
    compute_end_ms: float
    rerun_ms: float
    exposed_ms: float
    overhead: float


def replay(
    graph: Graph,
    steps: Iterable[Step],
    budget_bytes: int = UNBOUNDED,
    out_gbps: float = 0.0,
    in_gbps: float = 0.0,
) -> Outcome:
    """Cost of `steps`; raises `InvalidSchedule` at the first step that breaks a rule."""
    device = _Device(graph, budget_bytes, out_gbps, in_gbps)
    verbs = {RUN: device.run, FREE: device.free, OUT: device.copy_out, IN: device.copy_in}
    for verb, what in steps:
        verbs[verb](what)
    return device.outcome()


class _Device:
    def __init__(self, graph: Graph, budget_bytes: int, out_gbps: float, in_gbps: float) -> None:
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.out_rate, self.in_rate = out_gbps * 1e6, in_gbps * 1e6  # bytes per ms
        self.sizes: list[int] = graph.tensor_bytes.tolist()
        self.op_ms: list[float] = graph.op_ms.tolist()
        self.workspace: list[int] = graph.op_workspace_bytes.tolist()
        self.replayable: list[bool] = graph.replayable.tolist()
        self.resident: list[bool] = graph.resident.tolist()
        self.present = [bool(value) for value in graph.resident]
        self.leaving: dict[int, float] = {}
        self.host_ready: dict[int, float] = {}
        self.arriving: dict[int, float] = {}
        self.in_flight: deque[tuple[float, int]] = deque()
        self.clock = self.out_free = self.in_free = 0.0
        self.used = self.peak = graph.resident_bytes
        self.next_first = 0
        self.rerun_ms = 0.0
        if self.used > budget_bytes:
            raise InvalidSchedule("resident tensors alone exceed the budget")

    def run(self, op: int) -> None:
        if op > self.next_first:
            raise InvalidSchedule(f"op {op} runs before op {self.next_first} ran for the first time")
        if op == self.next_first:
            self.next_first += 1
        else:
            if not self.replayable[op]:
                raise InvalidSchedule(f"op {op} may run only once")
            self.rerun_ms += self.op_ms[op]
        start = self.clock
        for tensor in self.graph.reads[op]:
            if not self.present[tensor]:
                raise InvalidSchedule(f"op {op} reads tensor {tensor}, which is not on the device")
            if tensor in self.leaving:
                raise InvalidSchedule(f"op {op} reads tensor {tensor} while it is leaving")
            if tensor in self.arriving:
                start = max(start, self.arriving[tensor])
        writes = self.graph.writes[op]
        need = self.workspace[op] + sum(self.sizes[tensor] for tensor in writes)
        self._land(start)
        while self.used + need > self.budget_bytes and self.in_flight:
            start = self.in_flight[0][0]
            self._land(start)
        self._reach(self.used + need, f"op {op}")
        for tensor in writes:
            if tensor in self.leaving:
                raise InvalidSchedule(f"op {op} writes tensor {tensor} while it is leaving")
            if not self.present[tensor]:
                self.present[tensor] = True
                self.used += self.sizes[tensor]
        self.clock = start + self.op_ms[op]

    def free(self, tensor: int) -> None:
        if not self.present[tensor] or self.resident[tensor] or tensor in self.leaving:
            raise InvalidSchedule(f"tensor {tensor} cannot be freed here")
        if self.arriving.get(tensor, 0.0) > self.clock:
            raise InvalidSchedule(f"tensor {tensor} is freed while it arrives")
        self._drop(tensor)

    def copy_out(self, tensor: int) -> None:
        if self.out_rate <= 0 or self.in_rate <= 0:
            raise InvalidSchedule("there is no link to the host")
        if not self.present[tensor] or self.resident[tensor] or tensor in self.leaving:
            raise InvalidSchedule(f"tensor {tensor} cannot be copied out here")
        if self.arriving.get(tensor, 0.0) > self.clock:
            raise InvalidSchedule(f"tensor {tensor} leaves while it arrives")
        self.out_free = max(self.clock, self.out_free) + self.sizes[tensor] / self.out_rate
        self.leaving[tensor] = self.host_ready[tensor] = self.out_free
        self.in_flight.append((self.out_free, tensor))

    def copy_in(self, tensor: int) -> None:
        self._land(self.clock)
        if tensor not in self.host_ready or self.present[tensor]:
            raise InvalidSchedule(f"tensor {tensor} cannot be brought back here")
        self.present[tensor] = True
        self.used += self.sizes[tensor]
        self._reach(self.used, f"in {tensor}")
        start = max(self.clock, self.in_free, self.host_ready[tensor])
        self.arriving[tensor] = self.in_free = start + self.sizes[tensor] / self.in_rate

    def outcome(self) -> Outcome:
        if self.next_first < self.graph.op_count:
            raise InvalidSchedule(f"op {self.next_first} never runs")
        for tensor in self.graph.kept.nonzero()[0].tolist():
            if not self.present[tensor] or tensor in self.leaving:
                raise InvalidSchedule(f"kept tensor {tensor} is not on the device at the end")
            self.clock = max(self.clock, self.arriving.get(tensor, 0.0))
        plain = self.graph.plain_ms
        return Outcome(
            peak_bytes=self.peak,
            compute_end_ms=self.clock,
            rerun_ms=self.rerun_ms,
            exposed_ms=max(0.0, self.clock - plain - self.rerun_ms),
            overhead=max(0.0, self.clock / plain - 1.0) if plain > 0 else 0.0,
        )

    def _land(self, now: float) -> None:
        """Free the device copies whose way out has ended by `now`."""
        while self.in_flight and self.in_flight[0][0] <= now:
            _, tensor = self.in_flight.popleft()
            del self.leaving[tensor]
            self._drop(tensor)

    def _drop(self, tensor: int) -> None:
        self.present[tensor] = False
        self.arriving.pop(tensor, None)
        self.used -= self.sizes[tensor]

    def _reach(self, used_bytes: int, where: str) -> None:
        if used_bytes > self.budget_bytes:
            raise InvalidSchedule(f"{where} needs {used_bytes} bytes of {self.budget_bytes}")
        self.peak = max(self.peak, used_bytes)
