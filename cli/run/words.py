"""The three lines at the end of `memopt run`: held or not, predicted beside measured, what it cost."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from memopt.instrument.script.children import PUT_BEFORE, not_followed
from memopt.outcome import MOVED_BESIDE
from memopt.plan import NOT_MET
from memopt.units import format_bytes, format_change, format_ms
from memopt.words import moved_away, waited_words

if TYPE_CHECKING:
    from memopt.cli.run.course import Course
    from memopt.outcome import Outcome
    from memopt.plan import Plan

_OFF = 0.005
"""Share by which a measured peak may pass the budget before the plan is thrown away."""
_OFF_ABOVE = 0.02
"""The same of the predicted peak, where that is above the budget: the next plan will be no better."""
_NOISE = 0.05
"""Share of a step by which steps differ anyway: no plan makes one shorter by more."""
_SKIPPED = 0.2
_LARGER = 1.25
"""Times as much as the recorded iteration saved."""
_HARDLY = 0.05
"""Of the budget: the guard has all but held the largest iterations beside a plan for usual ones, which costs these less than one for the
largest."""
_MORE = 0.02
"""By so much more, or half as much again, another iteration may pass it: a batch that a loader has at hand."""
_MOST_NOTES = 3


def did_what_it_said(course: Course) -> bool:
    """Is the plan worth keeping for the next run?"""
    plan, outcome = course.plan, course.outcome
    if plan is None or outcome is None:
        return False
    if _passed_by(course, plan) > 1 and not course.grows_in_vain:
        return False
    counts = outcome.actions
    return _steps_under_it(course) < 3 or counts.skipped <= _SKIPPED * counts.planned


def _passed_by(course: Course, plan: Plan) -> float:
    """How many times the budget, or the planned peak where that is above it, iterations came to that the plan is for, and larger ones where the guard
    did not all but hold them; 1.0 where they did not pass it."""
    above = plan.over_bytes > 0
    most, off = (plan.predicted_peak_bytes, _OFF_ABOVE) if above else (plan.budget_bytes, _OFF)
    peaks = course.last_peaks
    found = [1.0]
    if peaks is not None:
        found += [each / most for each, free in ((peaks.planned, off), (peaks.larger, _HARDLY)) if each > (1 + free) * most]  # fmt: skip
    return max(found)


def _steps_under_it(course: Course) -> int:
    """Under the last plan."""
    return course.iterations - max(course.enforced_after or 0, *course.phases_after, 0)


def last_words(course: Course) -> list[str]:
    """Lines for stderr, without `memopt: `."""
    plan, outcome = course.plan, course.outcome
    if course.online and course.guards and not course.problem:
        return _guarded(course)
    if plan is None or outcome is None:
        return [_not_enforced(course), *_meanwhile(course)]
    not_under_it = [*_before_the_plan(course), *_recorded_again(course, plan)]
    held = (
        _elsewhere_in_threads(course)
        or _outside_iterations(course, plan)
        or _held(plan, outcome, course.peak_bytes or None, state_is_away=course.state_away_bytes > 0)
        + _elsewhere(plan, outcome)
    )
    if not_under_it and held.startswith("held"):
        held = f"held under the plan{held.removeprefix('held')}; it was passed when no plan was in force (see the note)"
    lines = [
        held,
        _beside(course, plan, outcome),
        _cost(course, plan, outcome),
    ]
    stopped = [f"the script went on without a plan: {course.problem}"] if course.problem else []
    if course.elsewhere and not _elsewhere_in_threads(course):
        stopped.append(f"backward was called {course.elsewhere} times in another thread, which nobody watched: what that took is not told here")  # fmt: skip
    notes = [
        *course.notes,
        *stopped,
        *outcome.notes[:_MOST_NOTES],
        *_of_the_first(course, plan),
        *(_grown(course) or _not_kept(course)),
    ]
    return [
        *lines,
        *not_under_it,
        *(f"note: {each}" for each in notes),
    ]


def came_to(course: Course) -> float:
    """How many times as much as the recorded iteration the next run's plan is to be for, where this one passed the budget: as much as one
    saved, or by as much more as it was passed, and a little. 1.0 elsewhere, and where the plan is above the budget: none leaves room then."""
    plan = course.plan
    if plan is None or plan.over_bytes or course.outcome is None:
        return 1.0
    passed_by = _passed_by(course, plan)
    larger = course.last_peaks.larger if course.last_peaks is not None else 0
    found = [1.0]
    if course.most_saved > plan.grown and larger > (1 + _HARDLY) * plan.budget_bytes:
        found.append(course.most_saved)
    if passed_by > 1 and not course.phase:
        found.append(plan.grown * (passed_by + min(_MORE, (passed_by - 1) / 2)))
    return max(found)


def _of_the_first(course: Course, plan: Plan) -> list[str]:
    """That a share is one of the recorded iteration's peak, where larger iterations came and passed it."""
    grew = course.grew or course.most_saved >= _LARGER
    if not (course.is_share and grew and course.peak_bytes > plan.budget_bytes):
        return []
    return [f"{course.budget.strip()} is of what the iteration recorded first takes; larger ones came later: give a budget in bytes for these"]  # fmt: skip


def _grown(course: Course) -> list[str]:
    factor = came_to(course)
    if factor == 1.0:
        return []
    if course.next_recorded:
        return [f"the next run of this command records iteration {course.next_recorded}, which saved tensors that this plan knows nothing of, and plans for that"]  # fmt: skip
    if course.grows_in_vain:
        return ["planning for larger iterations has not lowered that peak in a run before, and is not done again"]  # fmt: skip
    return [f"the next run of this command plans for iterations that take {factor:.2f} times as much as the recorded one, as far as the budget allows"]  # fmt: skip


def _not_kept(course: Course) -> list[str]:
    """Why the next run has to look for a plan again."""
    plan = course.plan
    if plan is None or course.outcome is None or did_what_it_said(course):
        return []
    why = (
        "the peak passed what it predicts"
        if _passed_by(course, plan) > 1
        else "many of its actions were skipped"
    )
    return [f"the plan is not kept for the next run, which records and plans again: {why}"]


def _before_the_plan(course: Course, when: str = "before the plan took effect") -> list[str]:
    """Where the guard could not hold the budget until the plan took over, or recording did not."""
    worst = max(course.guards, key=lambda guard: guard.most_bytes, default=None)
    if worst is None:
        return []
    most, how = worst.most_bytes, f": {worst.passed.words}" if worst.passed.words else ""
    if course.most_while_recorded > most:
        most, how = course.most_while_recorded, ", as an iteration was recorded"
    if most <= worst.budget_bytes:
        return []
    again = "; the next run starts under the plan" if did_what_it_said(course) else ""
    return [f"note: {when}, live bytes reached {format_bytes(most)}{how}{again}"]


def _recorded_again(course: Course, plan: Plan) -> list[str]:
    """Where that took more than any iteration under a plan."""
    most = course.most_recorded_again
    if most <= max(plan.budget_bytes, course.peak_bytes):
        return []
    return [f"note: when an iteration was recorded again, for another plan, live bytes reached {format_bytes(most)}"]  # fmt: skip


def _meanwhile(course: Course) -> list[str]:
    """What was done to hold the budget until there would have been a plan."""
    passed = _before_the_plan(course, "meanwhile")
    moved = [(guard.moved, guard.moved_bytes) for guard in course.guards if guard.moved]
    if not moved:
        return passed
    words = moved_away(*map(sum, zip(*moved, strict=True)))
    return [f"note: to hold the budget meanwhile {words}, which takes time", *passed]


def _guarded(course: Course) -> list[str]:
    """What became of a run without a plan."""
    guard, budget = course.guards[-1], format_bytes(course.budget_bytes or 0)
    peak = format_bytes(guard.most_bytes)
    if guard.most_bytes > guard.budget_bytes:
        above = format_bytes(guard.most_bytes - guard.budget_bytes)
        why = guard.passed.words or "for a moment, until something was moved or collected"
        held = f"NOT held: live bytes reached {peak}, {above} above the budget of {budget}; {why}"
    else:
        held = f"held: live bytes reached {peak}, within the budget of {budget}"
        if guard.device == "cpu":
            held += "; what kernels take beside tensors while they run is not counted"
    moved = (
        f"{moved_away(guard.moved, guard.moved_bytes)} in {course.iterations} iterations"
        if guard.moved
        else f"nothing {'else ' if course.state_away_bytes else ''}had to be moved in {course.iterations} iterations"
    )
    if guard.why_no_more:
        moved += f"; {guard.why_no_more}"
    times = [course.times_ms[each] for each in sorted(course.times_ms) if each > 1]
    return [held, moved, f"step {format_ms(median(times))}" if times else "no whole step was seen"]


def _not_enforced(course: Course) -> str:
    if course.problem:
        return f"nothing was enforced, the script ran plain: {course.problem}"
    if course.still_planning:
        return (
            f"nothing was enforced: the script ended after {course.iterations} iterations, before its plan was found; "
            "it is looked for another minute, for the next run"
        )
    if not course.iterations and (elsewhere := not_followed()):
        return f"nothing was enforced: {elsewhere}; try {PUT_BEFORE}"
    if course.iterations < 3:
        if not course.iterations:
            return "nothing was enforced: no iteration of training was seen in this process, and three are needed"
        return (
            f"nothing was enforced: {'one iteration of training was' if course.iterations == 1 else f'{course.iterations} iterations of training were'} seen in this process, and three are needed; "
            "memopt profile tells what was there"
        )
    told = f"nothing was enforced: the script ended after {course.iterations} iterations, before its plan was in force"
    if course.no_plan_until:
        told += f"; no optimizer of torch's stepped, so each backward call was one, and a plan waits for {course.no_plan_until} of those"
    return told


def _elsewhere_in_threads(course: Course) -> str:
    """Most of the training was in threads that nobody watched: what was seen is no figure of it."""
    if course.elsewhere < max(1, course.iterations):
        return ""
    return (
        f"NOT held, as far as anybody knows: backward was called {course.elsewhere} times in threads other than the one that is watched, "
        "and what that took is not among the figures below; a budget can be held where one thread trains"
    )


def _outside_iterations(course: Course, plan: Plan) -> str:
    """The budget was passed where the script looked at optimizer state or gradients, or after the last step, and nowhere by more."""
    peak, budget = max(course.most_at_looks, course.most_after), plan.budget_bytes
    if peak <= max(budget, course.peak_bytes):
        return ""
    others = f"; iterations peak at {format_bytes(course.peak_bytes)}" if course.peak_bytes else ""
    when = (
        "when the script looked at optimizer state or gradients that were away (a checkpoint, say), and come back for that"
        if peak == course.most_at_looks
        else "after the last step (an evaluation, say)"
    )
    return f"NOT held: {format_bytes(peak)}, {format_bytes(peak - budget)} above the budget of {format_bytes(budget)}, {when}{others}"


def _held(plan: Plan, outcome: Outcome, peak: int | None, *, state_is_away: bool = False) -> str:
    """`held`, `NOT held` with what holds the floor, or that there was nothing to do."""
    budget = format_bytes(plan.budget_bytes)
    plain_bytes = plan.unplanned_peak_bytes + plan.state_beside_bytes
    plain = format_bytes(plain_bytes)
    floor = next((note.removeprefix(NOT_MET) for note in plan.notes if note.startswith(NOT_MET)), "")
    known = peak if peak is not None else plan.predicted_peak_bytes
    how = "" if peak is not None else " by prediction: no enforced iteration was measured"
    # where the guard moved tensors beside it, the plain peak is of another iteration
    is_less = known < plain_bytes
    if known > plan.budget_bytes:
        told = f"NOT held: peak {format_bytes(known)}, {format_bytes(known - plan.budget_bytes)} above the budget of {budget}{how}"
        without = f", without the plan {plain}" if is_less else ""
        return f"{told}{without}; {floor}" if floor else told
    changes = bool(plan.actions or plan.script_actions or state_is_away)
    if not changes and not any(note.startswith(MOVED_BESIDE) for note in outcome.notes):
        return f"held: training peaks at {format_bytes(known)} as it is, within the budget of {budget}{how}; nothing was changed"
    if plan.over_bytes and outcome.other_steps:
        needed = format_bytes(plan.predicted_peak_bytes)
        return f"held: peak {format_bytes(known)}, within the budget of {budget}, in iterations unlike the profiled one, which would take {needed}"
    without = f"; without the plan {plain}" if is_less else ""
    return f"held{how}: peak {format_bytes(known)}, within the budget of {budget}{without}"


def _elsewhere(plan: Plan, outcome: Outcome) -> str:
    """What passed the budget where nothing trains. A GPU counts the whole run, the iterations before the plan too."""
    held = outcome.outside_peak_bytes
    if held <= plan.budget_bytes or plan.device.kind != "cpu":
        return ""
    return f"; about {format_bytes(held)} were held outside training (loading, an evaluation), which no plan lowers"


def _beside(course: Course, plan: Plan, outcome: Outcome) -> str:
    predicted = (
        f"predicted peak {format_bytes(plan.predicted_peak_bytes)}, step {format_ms(plan.predicted_step_ms)}"
    )
    peak, step = outcome.measured_peak_bytes, outcome.measured_step_ms
    compared = outcome.compared_step_ms
    measured = [
        f"peak {format_bytes(peak)} ({format_change(peak, plan.predicted_peak_bytes, none='0 %')})"
        if peak is not None
        else "no peak",
        f"step {format_ms(step)} ({format_change(compared, plan.predicted_step_ms, none='0 %')}{_by_elements(outcome)})"
        if step is not None and compared is not None
        else "no step",
    ]
    most = format_bytes(course.peak_bytes)
    if peak is not None and course.peak_bytes > peak and most != format_bytes(peak):
        where = (
            "under a plan before"
            if course.peak_bytes > course.last_peak_bytes
            else "in iterations that were not measured"
        )
        measured[0] += f" and {most} {where}"
    return f"{predicted}; measured {', '.join(measured)}"


def _by_elements(outcome: Outcome) -> str:
    """How steps are held against the profiled one that saved more or less than that."""
    return ", scaled to the profiled iteration's size" if outcome.as_profiled_step_ms is not None else ""


def _cost(course: Course, plan: Plan, outcome: Outcome) -> str:
    step, plain = outcome.compared_step_ms, format_ms(plan.plain_step_ms)
    if step is None:
        parts = ["cost not measured"]
    elif step < (1 - _NOISE) * plan.plain_step_ms:
        parts = [
            f"cost not known: a step took {format_ms(step)}, the plain one that was timed {plain}, as early ones are slow"
        ]
    else:
        waited = waited_words(outcome.waited_share)
        parts = [
            f"cost {format_change(step, plan.plain_step_ms)} a step{_by_elements(outcome)} (plain {plain}{f'; {waited}' if waited else ''})"
        ]
    counts = outcome.actions
    if counts.planned:
        parts.append(f"{counts.done} of {counts.planned} actions done")
    if course.from_cache:
        parts.append(f"enforced from the first of {course.iterations} iterations, as .memopt/ had the plan")
    else:
        parts.append(f"enforced after {course.enforced_after} of {course.iterations} iterations")
    if course.better_after is not None:
        parts.append(f"under a better plan after {course.better_after}")
    parts += [
        f"under another after {each}, as the training goes on otherwise" for each in course.phases_after
    ]
    if course.recorded:
        parts.append(
            f"recording and waiting for the plan took {format_ms(course.extra_ms)} more than plain steps"
        )
    return ", ".join(parts)
