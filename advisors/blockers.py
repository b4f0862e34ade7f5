"""What stands in the way of a smaller peak, in words: what lives at the peak that no plan can move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.advisors.problem import DEFAULT_ALLOW, Decisions, Problem
from memopt.errors import BudgetInfeasible, enough
from memopt.timeline import Timeline
from memopt.trace import CATEGORIES, PHASES
from memopt.units import format_bytes

_STATE = ("parameter", "gradient", "optimizer state", "buffer")


def infeasible(problem: Problem, decisions: Decisions, who: str = "") -> BudgetInfeasible:
    """The error that says how near `decisions` came and what remains at their peak."""
    timeline = problem.run(decisions)
    blockers = peak_blockers(problem, decisions, timeline)
    peak = timeline.peak_bytes
    try_ = f"{enough(peak)}, {'--strategy auto, ' if who else ''}or a smaller batch"
    if DEFAULT_ALLOW - problem.allow:
        try_ += ", or fewer kinds of action denied"
    found_by = (f"this is the best that {who} finds",) if who else ()
    return BudgetInfeasible(problem.budget_bytes, peak, found_by + blockers, try_=try_)


@dataclass(frozen=True, slots=True)
class Floor:
    """What no plan of the allowed kinds can go below, and the op that needs it."""

    bytes: int
    words: str


def lowest_floor(problems: Iterable[Problem]) -> Floor:
    """The floor of a run that may be any of `problems`."""
    problem = min(problems, key=lambda each: each.floor_bytes)
    size, op = problem.floor
    at = f": {place_of(problem, op)}" if op >= 0 else ""
    return Floor(size, f"no plan can go below {format_bytes(size)}{at}")


def place_of(problem: Problem, op: int) -> str:
    """`backward of layers.0.conv1 (aten.convolution_backward.default)`."""
    trace = problem.view.trace
    where = trace.strings[trace.ops.module[op]].partition("#")[0].lstrip("@") or "the script"
    phase = PHASES[int(problem.view.phase[op])]
    return f"{phase if phase != 'other' else 'an op'} of {where} ({trace.op_name(op)})"


def peak_blockers(problem: Problem, decisions: Decisions, timeline: Timeline) -> tuple[str, ...]:
    """State in one sentence, then the largest storages at the peak, then the op that runs there."""
    view, op = problem.view, timeline.peak_op
    trace = view.trace
    state: dict[str, int] = defaultdict(int)
    others: list[tuple[int, str]] = []
    for storage in range(trace.storage_count):
        if not view.birth[storage] < op <= view.death[storage]:
            continue
        size, category = int(view.size[storage]), CATEGORIES[trace.storages.category[storage]]
        if category in _STATE:
            state[category] += size
        elif storage not in decisions:
            others.append((size, trace.storage_label(storage)))
    others.sort(reverse=True)
    found = []
    if state:
        names = ", ".join(f"{name}s" if name != "optimizer state" else name for name in _STATE if state[name])
        found.append(f"{names} take {format_bytes(sum(state.values()))}")
    if others:
        listed = ", ".join(f"{label} ({format_bytes(size)})" for size, label in others[:3])
        found.append(f"needed at once at the peak: {listed}")
    if view.n:
        where = trace.strings[trace.ops.module[op]].partition("#")[0].lstrip("@") or "the script"
        extra = format_bytes(int(view.extra[op]))
        found.append(f"the peak is at {trace.op_name(op)} in {where}, which itself takes {extra}")
    return tuple(found)
