"""`memopt advise --strategy A --strategy B`: what each makes of the budget, and which plan is taken."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from memopt.cli.advise.comparison_row import Row
from memopt.cli.advise.one_plan import write_and_show
from memopt.cli.advise.setting import setting_of
from memopt.cli.advise.words import with_command
from memopt.cli.requests import AdviseRequest
from memopt.errors import BudgetInfeasible, MemoptError, NotPossibleHere, UsageError, enough

if TYPE_CHECKING:
    from memopt.advisors.advise import Adviser
    from memopt.plan import Plan


def compare_strategies(request: AdviseRequest) -> int:
    """Plan by each, write the fastest plan, show all; gives the exit code."""
    from memopt.advisors.kinds import kinds_named

    setting = setting_of(request)
    budget = setting.budget()
    rows = compare(setting.adviser, budget.tensors_bytes, request.strategies, kinds_named(request.allow))
    best = best_of(rows)
    if best is not None:
        return write_and_show(setting, best, budget, rows=rows)
    error = failure(rows, budget.tensors_bytes)
    setting.tell_no_plan(error, rows)
    if isinstance(error, BudgetInfeasible):
        raise with_command(budget.told(error), request)
    if error is not None:
        raise error
    return 0


def compare(
    adviser: Adviser, budget_bytes: int, strategies: tuple[str, ...], named: frozenset[str]
) -> list[Row]:
    """One row a strategy, in the order asked for; Ctrl-C ends it with the rows that there are.

    `named`: kinds of action that `--allow` names. Raises `KeyboardInterrupt` where there is no plan by then.
    """
    rows: list[Row] = []
    for name in dict.fromkeys(strategies):
        begin = time.monotonic()
        try:
            row = _row(adviser, budget_bytes, name, named)
        except KeyboardInterrupt:
            if not any(each.plan for each in rows):
                raise
            adviser.interrupted = True
            break
        rows.append(replace(row, seconds=time.monotonic() - begin))
        if adviser.interrupted:
            break
    return rows


def _row(adviser: Adviser, budget_bytes: int, name: str, named: frozenset[str]) -> Row:
    from memopt.advisors.registry import counsels

    try:
        if name in counsels():
            return _advice(adviser, budget_bytes, name, named)
        plan = adviser.plan(budget_bytes, name)
    except BudgetInfeasible as error:
        return Row(strategy=name, min_peak_bytes=error.min_peak_bytes)
    except (NotPossibleHere, UsageError) as error:
        why_not = ": ".join(part for part in (error.what, error.why) if part)
        return Row(strategy=name, why_not=f"{why_not} (try {error.try_})" if error.try_ else why_not)
    return Row(strategy=name, plan=plan, fits=True, step_ms=plan.predicted_step_ms)


def _advice(adviser: Adviser, budget_bytes: int, name: str, named: frozenset[str]) -> Row:
    from memopt.advisors.registry import counsels

    found = counsels()[name].study(adviser.problem(budget_bytes), named)
    step_ms = found.figures.get("step_ms")
    return Row(
        strategy=name,
        min_peak_bytes=found.peak_bytes,
        advised=True,
        fits=found.peak_bytes <= budget_bytes,
        step_ms=float(step_ms) if isinstance(step_ms, (int, float)) else None,
    )


def best_of(rows: list[Row]) -> Plan | None:
    """The fastest plan of a comparison; None where none plans within the budget."""
    return min((row.plan for row in rows if row.plan), key=lambda plan: plan.predicted_step_ms, default=None)


def failure(rows: list[Row], budget_bytes: int) -> MemoptError | None:
    """What to end with when no row has a plan; None when nobody else was asked and some advice meets the budget."""

    advised = [row for row in rows if row.advised]
    tried = [row for row in rows if row.min_peak_bytes is not None and not row.advised]
    if not tried and any(row.fits for row in advised):
        return None
    nearest = min(tried or advised, key=lambda row: row.min_peak_bytes or 0, default=None)
    if nearest is None:
        return NotPossibleHere(
            "none of these strategies is possible here",
            why="; ".join(f"{row.strategy}: {row.why_not}" for row in rows),
            try_="--strategy auto",
        )
    peak = nearest.min_peak_bytes or 0
    return BudgetInfeasible(budget_bytes, peak, (f"found by {nearest.strategy}",), try_=enough(peak))
