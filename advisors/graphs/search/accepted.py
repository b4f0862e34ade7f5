"""What is told at the end of a search: the cheapest plan that the judge accepts, or the smallest peak that was reached."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace

from memopt.advisors.clock import now
from memopt.advisors.graphs.judge import InvalidSchedule
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import floor_bytes, peak_of_runs, steps_of_runs
from memopt.advisors.graphs.schedule import Step
from memopt.advisors.graphs.search.least import least_memory, lowest_peak
from memopt.advisors.graphs.search.starts import LARGE, first_plan, starts

log = logging.getLogger(__name__)

Costed = tuple[float, list[Step]]
"""Time that a plan adds (ms), and its steps."""

STARTS_S = 10.0
"""How long the rules may take whose plans stand in for those that the judge refused."""
LEAST = 0.15
"""Of the limit, for the planner of little memory once the time is up."""
LEAST_MEMORY_S = 1.0
"""At most, for that."""


def accepted(problem: GraphProblem, found: list[Costed]) -> list[Step] | None:
    """The cheapest of `found` that the judge accepts, else what some quick rule makes of the graph; None where nothing holds."""
    ranked = [steps for _, steps in sorted(found, key=lambda item: item[0])]
    for steps in ranked:
        if _holds(problem, steps):
            return steps
    for runs in _otherwise(problem, refused=bool(ranked)):
        if _holds(problem, steps := steps_of_runs(problem.graph, runs)):
            return steps
    return None


def _otherwise(problem: GraphProblem, *, refused: bool) -> Iterator[list[int]]:
    """What the rules make of it, where the judge refused plans; then what every quick rule makes of a graph on which it takes milliseconds,
    so that nothing is refused for want of time."""
    if refused:
        yield from starts(problem, now() + STARTS_S)
    if problem.may_recompute and problem.graph.op_count <= LARGE:
        if runs := first_plan(replace(problem, until=math.inf), math.inf):
            yield runs
        if runs := least_memory(problem.graph, problem.budget_bytes, now() + LEAST_MEMORY_S):
            yield runs


def _holds(problem: GraphProblem, steps: list[Step]) -> bool:
    """Whether the judge accepts; a refusal is a bug here, but must not cost the user the plan."""
    try:
        problem.replay(steps)
    except InvalidSchedule as refusal:
        log.error("a plan was thrown away: %s", refusal)
        return False
    return True


def lowest_with_little_memory(problem: GraphProblem, reached: int) -> int:
    """The smallest peak between the budget and `reached` for which the planner of little memory has a plan; else `reached`."""
    if not problem.may_recompute:
        return reached
    low = max(problem.budget_bytes + 1, floor_bytes(problem.graph, swap=problem.may_swap)[0])
    most_s = min(LEAST_MEMORY_S, LEAST * (problem.latest - problem.begin))
    runs = lowest_peak(problem.graph, low, reached, now() + most_s)
    return peak_of_runs(problem.graph, runs) if runs else reached
