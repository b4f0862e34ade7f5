"""`memopt advise --budget B`, `--budget min` or `--max-overhead S`: one plan, by one strategy."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from memopt.cli.advise.setting import Setting, setting_of, tell_lints
from memopt.cli.advise.words import is_lowest, parse_share, with_command
from memopt.cli.requests import AdviseRequest
from memopt.errors import BudgetInfeasible

if TYPE_CHECKING:
    from memopt.advisors.explain import Explanation
    from memopt.cli.advise.comparison_row import Row
    from memopt.estimators.hidden.beside_tensors import Budget
    from memopt.plan import Plan


def one_plan(request: AdviseRequest) -> int:
    """Plan, write the plan, show it; gives the exit code."""
    from memopt.cli.shared.console import progress

    setting = setting_of(request)
    lowest = is_lowest(request.budget, request.strategies, max_batch=request.max_batch)
    budget = None
    try:
        with progress(f"planning {setting.adviser.trace.op_count} ops", short=True):
            _see_that_it_is_there(setting)
            budget = None if lowest or request.max_overhead else setting.budget()
            plan, explanation = _plan(setting, budget)
    except BudgetInfeasible as error:
        error = error if budget is None else budget.told(error)
        setting.tell_no_plan(error)
        raise with_command(error, request) from None
    return write_and_show(setting, plan, budget, explanation=explanation)


def _see_that_it_is_there(setting: Setting) -> None:
    """Raise `UsageError` where the tensor to be explained is none, before anything is planned."""
    from memopt.advisors.explain import matching

    if setting.request.explain is not None:
        matching(setting.adviser.problem(1), setting.request.explain)


def _plan(setting: Setting, budget: Budget | None) -> tuple[Plan, Explanation | None]:
    from memopt.advisors.explain import explain
    from memopt.advisors.frontier import lowest_peak

    adviser, request = setting.adviser, setting.request
    strategy = (request.strategies or ("auto",))[0]
    if request.max_overhead:
        found = lowest_peak(adviser, parse_share(request.max_overhead), strategy)
    elif budget is None:
        found = adviser.lowest(strategy)
    else:
        found = adviser.decide(budget.tensors_bytes, strategy)
    problem, decisions, notes = found
    explanation = explain(problem, decisions, request.explain) if request.explain is not None else None
    return adviser.write(problem, decisions, strategy, notes), explanation


def write_and_show(
    setting: Setting,
    plan: Plan,
    budget: Budget | None,
    *,
    explanation: Explanation | None = None,
    rows: list[Row] | None = None,
) -> int:
    """Write `plan`, show it with what goes with it, and say what to type next; gives the exit code."""
    import msgspec

    from memopt.cli.shared.console import say

    trace = setting.adviser.trace
    if trace.device.modelled:
        plan = msgspec.structs.replace(plan, notes=[*plan.notes, trace.notes[-1]])
    if budget is not None:
        plan = budget.noted(plan)
    plan.save(setting.output)
    if setting.request.as_json:
        _print_json(setting, plan, explanation, rows)
    else:
        _print(setting, plan, explanation, rows)
    say(f"wrote {setting.output}")
    does = plan.actions or plan.script_actions
    say(f"next: memopt apply {shlex.quote(str(setting.output))}" if does else "next: run the script as it is")
    return 0


def _print_json(
    setting: Setting, plan: Plan, explanation: Explanation | None, rows: list[Row] | None
) -> None:
    import msgspec

    from memopt.reports.formats.summary import encode, summarize_plan

    figures = summarize_plan(plan, top=setting.request.top) | {"plan": str(setting.output)}
    figures |= setting.figures(rows)
    if explanation is not None:
        figures["explanation"] = msgspec.to_builtins(explanation)
    click.echo(encode(figures))


def _print(setting: Setting, plan: Plan, explanation: Explanation | None, rows: list[Row] | None) -> None:
    from memopt.cli.advise.tables import explanation_table, strategies_table
    from memopt.cli.shared.console import out
    from memopt.reports.tables import words
    from memopt.reports.terminal import render_plan

    if rows is not None:
        out().print(strategies_table(rows))
    out().print(render_plan(plan, top=setting.request.top))
    if plan.actions or plan.script_actions:
        floor = setting.adviser.floor.words
        out().print(words(f"{floor[:1].upper()}{floor[1:]}."))
    if explanation is not None:
        out().print(explanation_table(explanation, plan))
    tell_lints(setting.lints, out())
