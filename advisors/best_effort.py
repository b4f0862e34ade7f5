"""The plan for a budget, or the one with the smallest peak that is found where none meets it: a run that nears its budget beats none."""

from __future__ import annotations

import msgspec

from memopt.advisors.advise import Adviser
from memopt.errors import BudgetInfeasible
from memopt.estimators.hidden.beside_tensors import parse_budget
from memopt.plan import AS_LITTLE, NOT_MET, Plan
from memopt.units import format_bytes

TRIES = 6
"""Each asks for what the refusal of the one before told; the plain peak is what is left then."""
_WIDER = 1.05
"""From the second try on: where time is short, a search may miss a peak that the one before came to."""


def best_effort(adviser: Adviser, budget: str, *, tries: int = TRIES) -> Plan:
    """The plan for `budget` (`16GB`, `60%` of the unplanned peak, as recorded). Where it cannot be met, the plan of the smallest peak found, with a
    note that begins with `NOT_MET`; its `budget_bytes` are those that were asked for."""
    meant = adviser.recorded or adviser
    asked = parse_budget(budget, meant.trace, unplanned_bytes=meant.unplanned_peak_bytes)
    budget_bytes = wanted_bytes = asked.tensors_bytes
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
    if blocked is None:
        return plan
    peak = format_bytes(plan.predicted_peak_bytes)
    note = f"{NOT_MET}the smallest peak found is {peak}; {'; '.join(blocked.blockers)}"
    notes = [note, *(each for each in plan.notes if not each.startswith("nothing to do"))]
    return msgspec.structs.replace(plan, budget_bytes=budget_bytes, notes=notes)


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
