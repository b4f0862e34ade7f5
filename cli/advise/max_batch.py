"""`memopt advise --max-batch`: the largest batch under the budget, without a plan and with one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.advise.words import with_command
from memopt.cli.requests import AdviseRequest
from memopt.errors import BudgetInfeasible, UsageError

if TYPE_CHECKING:
    from memopt.advisors.lints.registry import Lint
    from memopt.advisors.max_batch import Batches, Largest


def max_batch(request: AdviseRequest) -> int:
    """Search, show both, write the plan for the larger batch; gives the exit code."""
    from memopt.advisors.kinds import allowed
    from memopt.advisors.max_batch import Batches
    from memopt.advisors.profiles.problem import TIME_LIMIT_S
    from memopt.cli.advise.setting import file_for, lints_of, planned_trace, tell_lints
    from memopt.cli.shared.console import err, out, say
    from memopt.estimators.hidden.beside_tensors import parse_budget

    typed = _typed_budget(request)
    trace = planned_trace(request)
    output = file_for(request, trace)
    budget = parse_budget(typed, trace, unplanned_bytes=trace.peak_bytes)
    search = Batches(
        trace,
        budget.tensors_bytes,
        allowed(request.allow, request.deny),
        request.time_limit_s or TIME_LIMIT_S,
        strategy=(request.strategies or ("auto",))[0],
        flag=request.batch_arg,
        profile=str(request.source),
        say=say,
    )
    plain, planned = search.plain(), search.planned()
    lints = lints_of(trace)
    if planned.plan is None:
        if not request.as_json:
            tell_lints(lints, err())
        refused = BudgetInfeasible(
            search.budget_bytes, planned.peak_bytes, ("not even a batch of 1 fits, with any plan found",)
        )
        raise with_command(budget.told(refused), request)
    budget.noted(planned.plan).save(output)
    if request.as_json:
        _print_json(plain, planned, search, output, lints)
    else:
        _print(plain, planned, search)
        tell_lints(lints, out())
    say(f"wrote {output}")
    _say_what_to_heed(planned, search)
    if _names_the_batch(planned, search):
        say(f"next: memopt apply {shlex.quote(str(output))}")
    return 0


def _typed_budget(request: AdviseRequest) -> str:
    """The budget, of words that go with it. Raises `UsageError`."""
    for name in ("pareto", "max_overhead", "explain"):
        if getattr(request, name):
            raise UsageError(
                f"--{name.replace('_', '-')} does not go with --max-batch",
                why="the batch is what is searched for",
                try_="--max-batch --budget 16GB",
            )
    if len(request.strategies) > 1:
        raise UsageError("--max-batch takes one strategy", try_=f"--strategy {request.strategies[0]}")
    if request.budget is None:
        raise UsageError("--budget is missing", try_="--max-batch --budget 16GB, or --device NAME")
    return request.budget


def _say_what_to_heed(planned: Largest, search: Batches) -> None:
    from memopt.cli.shared.console import say

    assert planned.plan is not None
    batch = planned.batch
    if not _names_the_batch(planned, search):
        say(
            f"the plan is for batch {batch}, which no argument of the script sets: set it in the script, then memopt profile and "
            f"memopt advise once more; or name its flag with --batch-arg"
        )
    if planned.method == "scaled":
        say(
            f"kernels may need other workspaces at batch {batch}: to be sure, profile it there and advise again"
        )


def _names_the_batch(planned: Largest, search: Batches) -> bool:
    """Does the plan's command run the batch that the plan is for?"""
    assert planned.plan is not None
    return planned.batch == search.recorded or planned.plan.script.argv != search.trace.script.argv


def _print_json(plain: Largest, planned: Largest, search: Batches, output: Path, lints: list[Lint]) -> None:
    import msgspec

    from memopt.reports.formats.summary import encode

    figures = {
        "kind": "max batch",
        "recorded_batch": search.recorded,
        "budget_bytes": search.budget_bytes,
        "without_plan": _figures(plain),
        "with_plan": _figures(planned),
        "plan": str(output),
        "lints": msgspec.to_builtins(lints),
    }
    click.echo(encode(figures))


def _print(plain: Largest, planned: Largest, search: Batches) -> None:
    from memopt.cli.shared.console import out
    from memopt.reports.tables import pairs_table, words
    from memopt.units import format_bytes, format_ms

    rows = [
        (
            name,
            str(each.batch),
            format_bytes(each.peak_bytes),
            format_ms(each.step_ms) if each.batch else "-",
            f"{1000 * each.batch / each.step_ms:.3g}" if each.step_ms else "-",
            each.method,
        )
        for name, each in (("without a plan", plain), ("with a plan", planned))
    ]
    columns = ("", "largest batch", "peak", "step", "samples a second", "how it is known")
    within = format_bytes(search.budget_bytes)
    out().print(words(f"Within {within}, from a recording at batch {search.recorded}."))
    out().print(pairs_table("Largest batch", columns, rows))
    if planned.first_that_fails > planned.batch + 1:
        untried = f"{planned.batch + 1} to {planned.first_that_fails - 1}"
        out().print(
            words(f"With a plan, batches of {untried} were not tried; {planned.first_that_fails} has none.")
        )


def _figures(found: Largest) -> dict[str, Any]:
    return {
        "batch": found.batch,
        "peak_bytes": found.peak_bytes,
        "step_ms": found.step_ms or None,
        "method": found.method,
        "first_that_fails": found.first_that_fails or None,
    }
