"""ZeRO-Offload (Ren et al., ATC 2021, arXiv 2101.06840): the optimizer's state and its step on the host.

Rule: cut the data flow so that forward and backward stay on the device and everything of the size of the optimizer's state leaves
it: gradients go to the host as backward makes them, the host's fused optimizer steps, the parameters come back. The traffic is
one gradient and one parameter a step; a parameter is on its way back while the host updates the next. O(ops). Differs: the
master copy has the parameters' type; no delayed update (which would change results).
Reckoned from the trace and the link, not simulated, and advice only: nothing in memopt moves an optimizer, and a host's
arithmetic may differ from the device's in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memopt.advisors.advice import Advice
from memopt.advisors.problem import Problem
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.decision import Decision
from memopt.estimators.trace_view import Ints, TraceView
from memopt.plan import ScriptAction
from memopt.trace import CATEGORIES, PHASES
from memopt.units import format_bytes, format_ms

HOST_BYTES_PER_S = 20e9
"""Memory rate of a host's fused optimizer, assumed: two channels of DDR4."""
_GRADIENT, _STATE, _PARAMETER = (CATEGORIES.index(n) for n in ("gradient", "optimizer state", "parameter"))
_OPTIMIZER = PHASES.index("optimizer")


class ZeroOffload:
    name = "zero-offload"
    paper = "Ren et al. 2021, ZeRO-Offload: Democratizing Billion-Scale Model Training"
    needs = "a GPU (or --device), an optimizer with state; advice only"
    allows = frozenset({"optimizer"})

    def study(self, problem: Problem, allow: frozenset[str], /) -> Advice:
        view = problem.view
        if problem.device.kind == "cpu":
            raise NotPossibleHere(
                "there is nothing to take to the host",
                why="this profile is of a run on the CPU, whose memory is the host's",
                try_="--device NAME, to ask it of a GPU",
            )
        swap = Decision(kind="swap", tier="host")
        copy = problem.simulator.copy_ms
        if not np.isfinite(copy(1, swap, out=True) + copy(1, swap, out=False)):
            raise UsageError("the rate of the link to the host is not known", try_="memopt calibrate")
        state = _total(view, _STATE)
        gradients = [s for s in range(len(view.size)) if _kind(view, s) == _GRADIENT]
        parameters = _total(view, _PARAMETER)
        begin = _first_step(view)
        high, copied_ms = _without(view, gradients, lambda size: copy(size, swap, out=True))
        peak = int(high[:begin].max(initial=0))
        backward_ms = float(view.start_ms[begin]) if begin < view.n else view.trace.step_ms
        device_ms = float(view.op_ms[begin:].sum())
        moved = sum(int(view.size[s]) for s in gradients)
        # State and parameters are read and written, gradients (as many bytes as parameters) read.
        update_ms = (2 * state + 3 * parameters) / HOST_BYTES_PER_S * 1000
        sizes = [int(view.size[s]) for s in range(len(view.size)) if _kind(view, s) == _PARAMETER]
        back_ms = after_the_updates_ms(sizes, update_ms, lambda size: copy(size, swap, out=False))
        late_ms = max(0.0, copied_ms - backward_ms)
        step_ms = view.trace.step_ms - device_ms + late_ms + update_ms + back_ms
        saved = problem.unplanned_peak_bytes - peak
        what = "state and step of the optimizer on the host"
        return Advice(
            strategy=self.name,
            verdict=f"With {what} the peak would be {format_bytes(peak)} instead of {format_bytes(problem.unplanned_peak_bytes)}, "
            f"and a step would take about {format_ms(step_ms)} instead of {format_ms(view.trace.step_ms)}.",
            rows=(
                ("optimizer state that leaves the device", format_bytes(state)),
                ("gradients that leave it as backward makes them", format_bytes(moved)),
                ("the step on the device, which goes", format_ms(device_ms)),
                ("the last gradient is on the host after backward by", format_ms(late_ms)),
                (f"the step on the host (at {HOST_BYTES_PER_S / 1e9:g} GB/s, assumed)", format_ms(update_ms)),
                ("the last parameter is back after that by", format_ms(back_ms)),
            ),
            figures={
                "state_bytes": state,
                "gradient_bytes": moved,
                "parameter_bytes": parameters,
                "peak_bytes": peak,
                "step_ms": step_ms,
                "host_update_ms": update_ms,
                "late_ms": late_ms,
                "back_ms": back_ms,
            },
            peak_bytes=peak,
            actions=(
                ScriptAction(kind="optimizer", what=what, why="ZeRO-Offload", saved_bytes=max(0, saved)),
            ),
            notes=(
                "advice only, not enforced: memopt moves no optimizer (torchao's CPUOffloadOptimizer and DeepSpeed do)",
                "reckoned from the trace and the link, not simulated; a host's arithmetic may differ in the last bits",
            ),
        )


def after_the_updates_ms(sizes: list[int], update_ms: float, back_ms: Callable[[int], float]) -> float:
    """How long after the last update the last parameter is back, where each is copied once it is updated and the link is free.

    `sizes`: bytes of the parameters; each takes its share of `update_ms`.
    """
    updated = free = 0.0
    for size in sizes:
        updated += update_ms * size / sum(sizes)
        free = max(free, updated) + back_ms(size)
    return max(0.0, free - update_ms)


def _kind(view: TraceView, storage: int) -> int:
    return view.trace.storages.category[storage]


def _total(view: TraceView, kind: int) -> int:
    return sum(
        int(size) for size, each in zip(view.size, view.trace.storages.category, strict=True) if each == kind
    )


def _first_step(view: TraceView) -> int:
    """The first op of the optimizer; the op count when there is none."""
    ops = np.flatnonzero(view.phase == _OPTIMIZER)
    return int(ops[0]) if len(ops) else view.n


def _without(view: TraceView, gradients: list[int], out_ms: Callable[[int], float]) -> tuple[Ints, float]:
    """Bytes on the device without state and with gradients only until they are copied; when the last one is."""
    high = view.high.astype(np.int64).copy()
    lane = 0.0
    for storage in sorted(gradients, key=lambda s: int(view.birth[s])):
        size, birth, death = int(view.size[storage]), int(view.birth[storage]), int(view.death[storage])
        if birth < 0:
            continue
        last_write = max((op for op, _ in view.value_times[storage]), default=birth)
        ready = float(view.start_ms[last_write] + view.op_ms[last_write])
        lane = max(lane, ready) + out_ms(size)
        gone = int(np.searchsorted(view.start_ms, lane))
        high[gone : death + 1] -= size
    for storage, kind in enumerate(view.trace.storages.category):
        if kind == _STATE:
            high[max(0, int(view.birth[storage])) : int(view.death[storage]) + 1] -= int(view.size[storage])
    return high, lane
