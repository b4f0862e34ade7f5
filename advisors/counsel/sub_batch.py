"""Sub-batches: moDNN's way out where no offload is enough.

The step is done in several passes over a part of the batch each; their gradients add up, and the optimizer steps once. The traces of the
parts are scaled (`trace_batch`), and planned like the whole, beside the gradients that the parts before left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.estimators.elsewhere.batch import recorded_batch
from memopt.estimators.elsewhere.trace_batch import trace_at_batch
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import Ints, TraceView
from memopt.trace import CATEGORIES, PHASES

_GRADIENT, _OPTIMIZER = CATEGORIES.index("gradient"), PHASES.index("optimizer")


@dataclass(frozen=True, slots=True)
class SubBatch:
    """`size` of `batch` samples at a time, and what the whole step comes to."""

    size: int
    batch: int
    peak_bytes: int
    step_ms: float


def largest_sub_batch(problem: Problem, plan: Callable[[Problem], Decisions]) -> SubBatch | None:
    """The largest part of the batch that divides it and fits as `plan` has it; None where there is none. Raises `NotPossibleHere` where
    the profile tells no batch."""
    trace = problem.view.trace
    batch = recorded_batch(trace)
    for size in (size for size in range(batch // 2, 0, -1) if batch % size == 0):
        view = TraceView(trace_at_batch(trace, batch, size))
        part = Problem(view, Simulator(view, problem.device), problem.budget_bytes, problem.allow)
        beside = gradients_before(view)
        for decisions in ({}, plan(part)):
            timeline = part.run(decisions)
            peak_bytes = int((timeline.high_bytes + beside).max(initial=0))
            if peak_bytes <= problem.target_bytes:
                once_ms = float(view.op_ms[view.phase == _OPTIMIZER].sum())
                step_ms = batch // size * (timeline.step_ms - once_ms) + once_ms
                return SubBatch(size, batch, peak_bytes, step_ms)
    return None


def gradients_before(view: TraceView) -> Ints:
    """Bytes at each op of the gradients that the passes before have left, beside those that this one makes."""
    held: Ints = view.high * 0
    for storage, kind in enumerate(view.trace.storages.category):
        if kind == _GRADIENT and view.birth[storage] >= 0:
            held[: int(view.birth[storage]) + 1] += int(view.size[storage])
    return held
