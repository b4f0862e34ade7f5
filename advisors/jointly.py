"""Whether the optimizer steps inside backward, decided together with all else.

That is a choice between two problems: the run as it is, and the run with the step moved. The moved one is searched first, since
what it frees costs next to nothing; the other one where a plan for it could still be cheaper. A plan that fits without the
move goes without it.
"""

from __future__ import annotations

from memopt.advisors.auto import Auto
from memopt.advisors.problem import Decisions, Problem
from memopt.errors import BudgetInfeasible

_SHARE_OF_THE_FIRST = 0.65
_NEAR = 0.003
"""Share of the step that is not worth another search."""


def plan_jointly(auto: Auto, moved: Problem) -> tuple[Problem, Decisions]:
    """The better problem and the decisions for it, within `auto`'s time limit. Raises `BudgetInfeasible` with the lowest peak of both."""
    plain, limit_s = moved.instead_of, auto.time_limit_s
    assert plain is not None
    hopeless = plain.floor_bytes > plain.target_bytes
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


def plan_moved_at_last(auto: Auto, moved: Problem) -> tuple[Problem, Decisions]:
    """As `plan_jointly` where moving the step lowers nothing by itself, but may lower what a plan leaves of the peak: only where there is
    none for the run as it is."""
    plain = moved.instead_of
    assert plain is not None
    try:
        return plain, auto.plan(plain)
    except BudgetInfeasible as error:
        return moved, _instead(auto, moved, auto.time_limit_s, error)


def _instead(auto: Auto, problem: Problem, seconds: float, error: BudgetInfeasible) -> Decisions:
    """A plan for `problem`, where none was found for the other one. Raises `BudgetInfeasible` with the lower peak of both."""
    try:
        return auto.within(problem, seconds)
    except BudgetInfeasible as other:
        raise min(error, other, key=lambda each: each.min_peak_bytes) from None
