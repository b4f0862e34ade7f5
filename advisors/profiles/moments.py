"""Where in backward swap-ins may start, and how many bytes are left there: what the run needs to move starts by itself."""

from __future__ import annotations

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.plan import Moment
from memopt.timeline import Timeline

_MOST = 400
"""Of a longer backward some are left out, evenly; planned starts are not."""


def moments_of(problem: Problem, decisions: Decisions, timeline: Timeline) -> list[Moment]:
    """The unpacks between the first op at which a swapped storage may be away and its last use; none without swaps that
    come back."""
    unasked = problem.view.unasked
    swaps = {s: d for s, d in decisions.items() if d.kind == "swap" and s not in unasked}
    saved = [problem.view.saved[storage] for storage in swaps]
    if not saved:
        return []
    begin, end = min(each.gone_after for each in saved) + 1, max(each.first_use for each in saved)
    ops = [op for op in problem.triggers.tolist() if begin <= op <= end]
    step = -(-len(ops) // _MOST)
    planned = {each.prefetch_op for each in swaps.values()}
    kept = [op for number, op in enumerate(ops) if number % step == 0 or op in planned]
    slots, strings = problem.view.trace.slots, problem.view.trace.strings
    found = []
    for op, following in zip(kept, [*kept[1:], end + 1], strict=True):
        slot = problem.view.first_unpacked[op]
        found.append(
            Moment(
                module=strings[slots.module[slot]],
                ordinal=slots.ordinal[slot],
                at_ms=round(float(timeline.start_ms[op]), 4),
                room_bytes=problem.budget_bytes - int(timeline.high_bytes[op : max(op + 1, following)].max()),
            )
        )
    return found
