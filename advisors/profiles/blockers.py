"""Refusals: the smallest peak that was found, what holds it, what would move it, and what no plan can go below."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memopt.advisors.profiles.holds import Hold, place_of
from memopt.advisors.profiles.problem import LEAST_GAIN, Decisions, Problem
from memopt.errors import BudgetInfeasible, enough
from memopt.units import format_bytes


@dataclass(frozen=True, slots=True)
class Reached:
    """Decisions for a problem, and their peak."""

    problem: Problem
    decisions: Decisions

    @property
    def is_plain(self) -> bool:
        """Is it the run as it is?"""
        return not self.decisions and not self.problem.is_of_another_run

    @property
    def peak_bytes(self) -> int:
        if self.is_plain:
            return self.problem.unplanned_peak_bytes
        return self.problem.run(self.decisions).peak_bytes


def infeasible(problem: Problem, decisions: Decisions, who: str = "") -> BudgetInfeasible:
    """The error that says how near `decisions` came, and what remains at that peak; where they gain next to nothing, the run as it is."""
    reached = min(Reached(problem, decisions), Reached(problem, {}), key=lambda each: each.peak_bytes)
    if reached.peak_bytes > (1 - LEAST_GAIN) * problem.unplanned_peak_bytes:
        reached = Reached(problem.instead_of or problem, {})
    return refusal(reached, problem.budget_bytes, who)


def refusal(reached: Reached, budget_bytes: int, who: str = "") -> BudgetInfeasible:
    """The error whose smallest peak is that of `reached`."""
    timeline = reached.problem.run(reached.decisions)
    hold = Hold(
        reached.problem,
        timeline.peak_op,
        reached.peak_bytes,
        frozenset({*reached.problem.given, *reached.decisions}),
    )
    found_by = (f"this is the best that {who} finds; --strategy auto may find more",) if who else ()
    if reached.is_plain:
        found_by = (
            f"that is the run as it is: no plan {f'of {who} ' if who else ''}was found that lowers it",
        )
    lines = (*found_by, hold.held_by(), *([moved] if (moved := hold.moved_by()) else []))
    return BudgetInfeasible(
        budget_bytes, reached.peak_bytes, lines, try_=enough(reached.peak_bytes), reached=reached
    )


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
