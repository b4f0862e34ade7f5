"""Whether the optimizer steps inside backward, decided together with all else.

That is a choice between two problems: the run as it is, and the run with the step moved. The moved one is searched first, since
what it frees costs next to nothing; the other one where a plan for it could still be cheaper. A plan that fits without the
move goes without it. Where a script waits, the run as it is comes first.
"""

from __future__ import annotations

from collections.abc import Callable

from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.errors import BudgetInfeasible

_SHARE_OF_THE_FIRST = 0.65
"""Of the time limit, for the run with the optimizer moved; the rest is for the run as it is, in case that is cheaper."""
_NEAR = 0.003
"""Share of the step that is not worth another search."""


def plan_jointly(auto: Auto, moved: Problem) -> tuple[Problem, Decisions]:
    """The better problem and the decisions for it, within `auto`'s time limit. Raises `BudgetInfeasible` with the lowest peak of both."""
    plain, limit_s = moved.instead_of, auto.time_limit_s
    assert plain is not None
    hopeless = plain.floor_bytes > plain.target_bytes
    if auto.for_steps and not hopeless:
        return _plain_first(auto, plain, moved)
    alone = hopeless and plain.floor_bytes >= moved.floor_bytes
    try:
        found = auto.within(moved, limit_s * (1.0 if alone else _SHARE_OF_THE_FIRST))
    except BudgetInfeasible as error:
        if hopeless and plain.floor_bytes >= error.min_peak_bytes:
            raise
        return plain, _instead(auto, plain, limit_s * (1 - _SHARE_OF_THE_FIRST), error)
    same = plain.run(found)
    if plain.fits(same) and same.step_ms <= moved.run(found).step_ms:
        return plain, found
    spent_ms = moved.run(found).step_ms - moved.view.trace.step_ms
    if auto.interrupted or hopeless or spent_ms <= _NEAR * plain.plain_step_ms:
        return moved, found
    try:
        other = auto.within(plain, limit_s * (1 - _SHARE_OF_THE_FIRST))
    except BudgetInfeasible:
        return moved, found
    except KeyboardInterrupt:
        auto.interrupted = True
        return moved, found
    return (plain, other) if plain.run(other).step_ms <= moved.run(found).step_ms else (moved, found)


def _plain_first(auto: Auto, plain: Problem, moved: Problem) -> tuple[Problem, Decisions]:
    """As `plan_jointly` where a script waits: no better plan takes over from one that moves the step, so that one has to be worth it."""
    first_s = auto.time_limit_s * _SHARE_OF_THE_FIRST
    try:
        found = auto.within(plain, first_s)
    except BudgetInfeasible as error:
        return moved, _instead(auto, moved, auto.time_limit_s - first_s, error)
    step_ms = plain.run(found).step_ms
    if auto.interrupted or auto.is_enough(step_ms - plain.plain_step_ms):
        return plain, found
    try:
        other = auto.within(moved, auto.time_limit_s - first_s)
    except BudgetInfeasible:
        return plain, found
    return (plain, found) if step_ms <= moved.run(other).step_ms else (moved, other)


def plan_moved_at_last(auto: Auto, moved: Problem) -> tuple[Problem, Decisions]:
    """As `plan_jointly` where moving the step lowers nothing by itself, but may lower what a plan leaves of the peak: only where there is
    none for the run as it is."""
    plain = moved.instead_of
    assert plain is not None
    try:
        return plain, auto.plan(plain)
    except BudgetInfeasible as error:
        return moved, _instead(auto, moved, auto.time_limit_s, error)


_CHEAP = 0.02
"""Share of the step that is not worth looking at the optimizer's state for."""
_SHARE_FOR_PIECES = 0.4
"""Of the time limit, for each way of stepping in pieces: the cheapest that fits ends the search, so that two are the rule."""


def plan_with_pieces(
    auto: Auto,
    plain: Problem,
    in_pieces: Callable[[], list[Problem]],
    in_one: Callable[[], tuple[Problem, Decisions]],
    *,
    floor_bytes: int,
) -> tuple[Problem, Decisions]:
    """What `in_one` finds where that is cheap; else the cheapest of that and of those `in_pieces`, whose optimizer steps so. `floor_bytes`:
    of what `in_one` looks at. Raises `BudgetInfeasible` with the lowest peak of all."""
    errors: list[BudgetInfeasible] = []
    found: list[tuple[Problem, Decisions]] = []
    if floor_bytes <= plain.target_bytes:
        try:
            found.append(in_one())
        except BudgetInfeasible as error:
            errors.append(error)
        else:
            extra_ms = found[0][0].run(found[0][1]).step_ms - plain.plain_step_ms
            if auto.interrupted or extra_ms <= _CHEAP * plain.plain_step_ms or auto.is_enough(extra_ms):
                return found[0]
    others = in_pieces()
    possible = [each for each in others if each.floor_bytes <= each.target_bytes]
    if not possible and not found and not errors:  # nothing meets it: what comes nearest
        if not others or floor_bytes < min(each.floor_bytes for each in others):
            return in_one()
        nearest = min(others, key=lambda each: each.floor_bytes)
        return nearest, auto.within(nearest, auto.time_limit_s)
    for other in possible:
        if auto.interrupted:
            break
        if found and other.view.trace.step_ms >= min(problem.run(d).step_ms for problem, d in found):
            continue
        try:
            found.append((other, auto.within(other, _SHARE_FOR_PIECES * auto.time_limit_s)))
        except BudgetInfeasible as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda each: each.min_peak_bytes)
    return min(found, key=lambda pair: pair[0].run(pair[1]).step_ms)


def _instead(auto: Auto, problem: Problem, seconds: float, error: BudgetInfeasible) -> Decisions:
    """A plan for `problem`, where none was found for the other one. Raises `BudgetInfeasible` with the lower peak of both."""
    try:
        return auto.within(problem, seconds)
    except BudgetInfeasible as other:
        raise min(error, other, key=lambda each: each.min_peak_bytes) from None
