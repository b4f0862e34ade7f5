"""The plan for a budget, or the one with the smallest peak that is found where none meets it: a run that nears its budget beats none."""

from __future__ import annotations

import msgspec

from memopt.advisors.advise import Adviser
from memopt.errors import BudgetInfeasible
from memopt.estimators.hidden.beside_tensors import Budget, parse_budget
from memopt.plan import AS_LITTLE, NOT_MET, Plan
from memopt.units import format_bytes

TRIES = 6
"""Each asks for what the refusal of the one before told; the plain peak is what is left then."""
_WIDER = 1.05
"""From the second try on: where time is short, a search may miss a peak that the one before came to."""
_UNSURE = 0.01
"""Of the budget, so much is left where iterations are of several sizes: what grows in one need not grow alike."""
_MOST_STEPS = 3.0
"""Plain steps that a step may take under a plan which misses the budget by more than `_NEARLY` of it."""
_NEARLY = 0.02
_EASIER = (0.25, 0.5, 0.75)
"""Of what such a plan takes off the peak: so much is left there instead, the least with which the step takes no longer."""


def best_effort(adviser: Adviser, budget: str, *, tries: int = TRIES) -> Plan:
    """The plan for `budget` (`16GB`, `60%` of the unplanned peak, as recorded). Where it cannot be met, the plan of the smallest peak found, with a
    note that begins with `NOT_MET`; its `budget_bytes` are those that were asked for."""
    asked = _asked(adviser, budget)
    budget_bytes = asked.tensors_bytes
    wanted_bytes = int((1 - _UNSURE) * budget_bytes) if adviser.grown > 1 else budget_bytes
    blocked: BudgetInfeasible | None = None
    for tried in range(tries):
        try:
            plan = adviser.plan(wanted_bytes)
        except BudgetInfeasible as error:
            blocked = blocked or error
            wider_bytes = int(wanted_bytes * _WIDER) if tried else wanted_bytes
            wanted_bytes = max(int(error.min_peak_bytes * (1 + AS_LITTLE)), wider_bytes) + 1
        else:
            break
    else:
        plan = adviser.plan(adviser.unplanned_peak_bytes)
    plan = _of_larger_ones(asked.noted(plan), adviser)
    if blocked is None or plan.predicted_peak_bytes <= budget_bytes:
        return msgspec.structs.replace(plan, budget_bytes=budget_bytes)
    peak = format_bytes(plan.predicted_peak_bytes)
    note = f"{NOT_MET}the smallest peak found is {peak}; {'; '.join(blocked.blockers)}"
    notes = [note, *(each for each in plan.notes if not each.startswith("nothing to do"))]
    return msgspec.structs.replace(plan, budget_bytes=budget_bytes, notes=notes)


def may_be_met(adviser: Adviser, budget: str) -> bool:
    """Is no more than `budget` known to be needed?"""
    return adviser.floor.bytes <= _asked(adviser, budget).tensors_bytes


def _asked(adviser: Adviser, budget: str) -> Budget:
    """A share is of the peak as recorded."""
    meant = adviser.recorded or adviser
    return parse_budget(budget, meant.trace, unplanned_bytes=meant.unplanned_peak_bytes)


def within_reason(adviser: Adviser, plan: Plan) -> Plan:
    """`plan` of `best_effort`, or one of a larger peak, where it misses the budget by much and a step takes many plain ones: for recurrent layers
    of hundreds of small tensors it takes fifty."""
    too_slow = plan.predicted_step_ms > _MOST_STEPS * plan.plain_step_ms
    if not too_slow or plan.over_bytes <= _NEARLY * plan.budget_bytes:
        return plan
    least_bytes, found = plan.predicted_peak_bytes, plan
    saved_bytes = adviser.unplanned_peak_bytes - least_bytes
    for share in _EASIER:
        try:
            found = _of_larger_ones(adviser.plan(least_bytes + int(share * saved_bytes)), adviser)
        except BudgetInfeasible:
            continue
        if found.predicted_step_ms <= _MOST_STEPS * plan.plain_step_ms:
            break
    if found is plan or found.predicted_step_ms >= plan.predicted_step_ms:
        return plan
    of_the_least, of_this = (each.predicted_step_ms / plan.plain_step_ms for each in (plan, found))
    told = format_bytes(least_bytes)
    why = f"{told} (the step takes {of_the_least:.3g} plain ones then, and {of_this:.2g} under this plan)"
    notes = [each.replace(told, why, 1) if each.startswith(NOT_MET) else each for each in plan.notes]
    return msgspec.structs.replace(found, budget_bytes=plan.budget_bytes, notes=notes)


def _of_larger_ones(plan: Plan, adviser: Adviser) -> Plan:
    """Where it allows for iterations larger than the recorded one, what that takes is told without it."""
    recorded = adviser.recorded
    if recorded is None:
        return plan
    return msgspec.structs.replace(
        plan,
        grown=adviser.grown,
        unplanned_peak_bytes=recorded.unplanned_peak_bytes,
        base_bytes=recorded.trace.base_bytes,
    )
