"""ZeRO-Offload (Ren et al., ATC 2021, arXiv 2101.06840): the optimizer's state and its step on the host.

Rule: cut the data flow so that forward and backward stay on the device and everything of the size of the optimizer's state leaves
it: gradients go to the host as backward makes them, the host's fused optimizer steps, the parameters come back. The traffic is
one gradient and one parameter a step; a parameter is on its way back while the host updates the next. O(ops). Differs: the
master copy has the parameters' type; no delayed update (which would change results).
Bytes and times of the ops are the simulator's timeline of the plain run, copies take what it says they take; the two lanes of copies
are laid here, since it knows no copies but those of saved tensors, and the host's own step is reckoned from an assumed rate of
memory. Advice only: nothing in memopt moves an optimizer, and a host's arithmetic may differ from the device's in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

import numpy as np

from memopt.advisors.counsel.counsel import Advice
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.registry import counsel
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.trace_view import Floats, Ints
from memopt.plan import ScriptAction
from memopt.trace import CATEGORIES, PHASES
from memopt.units import format_bytes, format_ms

HOST_BYTES_PER_S = 20e9
"""Memory rate of a host's fused optimizer, assumed: two channels of DDR4."""
_GRADIENT, _STATE, _PARAMETER = (CATEGORIES.index(n) for n in ("gradient", "optimizer state", "parameter"))
_BACKWARD, _OPTIMIZER = (PHASES.index(n) for n in ("backward", "optimizer"))


@counsel
class ZeroOffload:
    name = "zero-offload"
    paper = "Ren et al. 2021, ZeRO-Offload: Democratizing Billion-Scale Model Training"
    needs = "a GPU (or --device), an optimizer with state; advice only"
    allows = frozenset({"optimizer"})
    not_on_graphs = "it tells parameters, gradients and optimizer state apart"
    enforced = False

    def study(self, problem: Problem, allow: frozenset[str], /) -> Advice:
        found = Offloaded(problem, *_link(problem))
        trace, plain_bytes = problem.view.trace, problem.unplanned_peak_bytes
        what = "state and step of the optimizer on the host"
        saved = max(0, plain_bytes - found.peak_bytes)
        return Advice(
            strategy=self.name,
            verdict=f"With {what} the peak would be {format_bytes(found.peak_bytes)} instead of {format_bytes(plain_bytes)}, "
            f"and a step would take about {format_ms(found.step_ms)} instead of {format_ms(trace.step_ms)}.",
            rows=(
                ("optimizer state that leaves the device", format_bytes(found.state_bytes)),
                ("gradients that leave it as backward makes them", format_bytes(found.gradient_bytes)),
                ("the step on the device, which goes", format_ms(found.device_ms)),
                ("the last gradient is on the host after backward by", format_ms(found.late_ms)),
                (f"the step on the host (at {HOST_BYTES_PER_S / 1e9:g} GB/s, assumed)", format_ms(found.update_ms)),
                ("the last parameter is back after that by", format_ms(found.back_ms)),
            ),
            figures={
                "state_bytes": found.state_bytes,
                "gradient_bytes": found.gradient_bytes,
                "parameter_bytes": sum(found.parameters),
                "peak_bytes": found.peak_bytes,
                "step_ms": found.step_ms,
                "host_update_ms": found.update_ms,
                "late_ms": found.late_ms,
                "back_ms": found.back_ms,
            },
            peak_bytes=found.peak_bytes,
            actions=(ScriptAction(kind="optimizer", what=what, why="ZeRO-Offload", saved_bytes=saved),),
            notes=(
                "advice only, not enforced: memopt moves no optimizer (torchao's CPUOffloadOptimizer and DeepSpeed do)",
                "reckoned from the trace and the link; a host's arithmetic may differ in the last bits",
            ),
        )  # fmt: skip


CopyMs = Callable[[int], float]


def _link(problem: Problem) -> tuple[CopyMs, CopyMs]:
    """How long so many bytes take to the host, and back. Raises `NotPossibleHere`, `UsageError`."""
    if problem.device.kind == "cpu":
        raise NotPossibleHere(
            "there is nothing to take to the host",
            why="this profile is of a run on the CPU, whose memory is the host's",
            try_="--device NAME, to ask it of a GPU",
        )
    swap, copy = Decision(kind="swap", tier="host"), problem.simulator.copy_ms
    if not np.isfinite(copy(1, swap, out=True) + copy(1, swap, out=False)):
        raise UsageError("the rate of the link to the host is not known", try_="memopt calibrate")
    return lambda size: copy(size, swap, out=True), lambda size: copy(size, swap, out=False)


class Offloaded:
    """What the step comes to without the optimizer's ops and state, and with gradients until they are copied."""

    def __init__(self, problem: Problem, out_ms: CopyMs, in_ms: CopyMs) -> None:
        self.view, plain = problem.view, problem.plain
        trace = self.view.trace
        self.starts: Floats = np.append(plain.start_ms, trace.step_ms)
        """Of each op; last, the end of the step."""
        self.steps: Ints = np.flatnonzero(self.view.phase == _OPTIMIZER)
        states = self._of_kind(_STATE)
        self.state_bytes = self._bytes(states)
        self.gradient_bytes = self._bytes(self._of_kind(_GRADIENT))
        self.high: Ints = plain.high_bytes.copy()
        for storage in states:
            self.high[max(0, int(self.view.birth[storage])) : int(self.view.death[storage]) + 1] -= int(
                self.view.size[storage]
            )
        self.late_ms = self._let_gradients_go(out_ms)
        outside = trace.peak_bytes - self.state_bytes if trace.peak_bytes > plain.peak_bytes else 0
        self.peak_bytes = max(outside, int(np.delete(self.high, self.steps).max(initial=0)))
        self.device_ms = float((self.starts[self.steps + 1] - self.starts[self.steps]).sum())
        self.parameters = self._updated()
        # State and parameters are read and written, gradients (as many bytes as parameters) read.
        self.update_ms = (2 * self.state_bytes + 3 * sum(self.parameters)) / HOST_BYTES_PER_S * 1000
        self.back_ms = after_the_updates_ms(self.parameters, self.update_ms, in_ms)
        self.step_ms = trace.step_ms - self.device_ms + self.late_ms + self.update_ms + self.back_ms

    def _of_kind(self, kind: int) -> list[int]:
        return [s for s, each in enumerate(self.view.trace.storages.category) if each == kind]

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(int(self.view.size[storage]) for storage in storages)

    def _updated(self) -> list[int]:
        """Bytes of the parameters that the optimizer writes, in that order; all of them where the trace does not tell."""
        view = self.view
        written = (view.value_storage[value] for op in self.steps.tolist() for value in view.writes[op])
        parameters = self._of_kind(_PARAMETER)
        known = {*parameters}
        updated = [s for s in dict.fromkeys(written) if s in known]
        return [int(view.size[storage]) for storage in updated or parameters]

    def _let_gradients_go(self, out_ms: CopyMs) -> float:
        """Copy each gradient once it is whole, on one lane; gives how long the optimizers wait for the last of theirs."""
        view = self.view
        rows = []
        for storage in self._of_kind(_GRADIENT):
            times = [op for op, _ in view.value_times[storage] if op >= 0 and view.phase[op] == _BACKWARD]
            if times:
                rows.append((max(times), min(times), storage))
        lane = late = 0.0
        for step, stepped in groupby(sorted(rows), key=lambda row: int(np.searchsorted(self.steps, row[0]))):
            for whole, first, storage in stepped:
                size = int(view.size[storage])
                lane = max(lane, float(self.starts[whole + 1]) + late) + out_ms(size)
                if view.birth[storage] < 0:
                    self.high[:first] -= size
                gone = int(np.searchsorted(self.starts, lane - late))
                self.high[max(gone, whole + 1) : int(view.death[storage]) + 1] -= size
            if step < len(self.steps):
                late += max(0.0, lane - late - float(self.starts[self.steps[step]]))
        return late


def after_the_updates_ms(sizes: list[int], update_ms: float, back_ms: CopyMs) -> float:
    """How long after the last update the last parameter is back, where each is copied once it is updated and the link is free.

    `sizes`: bytes of the parameters; each takes its share of `update_ms`.
    """
    updated = free = 0.0
    for size in sizes:
        updated += update_ms * size / sum(sizes)
        free = max(free, updated) + back_ms(size)
    return max(0.0, free - update_ms)
