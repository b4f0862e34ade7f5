"""`memopt advise`: what to swap, recompute or compress so that a script fits a budget. Each verb is a file beside this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from memopt.cli.advise.given import room_as_budget
from memopt.cli.advise.words import (
    check_goal,
    check_graph_words,
    check_of_profiles,
    check_words,
    with_command,
    with_variant,
)
from memopt.cli.requests import AdviseRequest
from memopt.cli.shared.device_name import DeviceName
from memopt.cli.shared.numbers import Real
from memopt.errors import BudgetInfeasible, UsageError

_KINDS = "recompute, swap-host, swap-disk (swap: both), compress, optimizer, in-place"


@click.command()
@click.option("--budget", "-b", metavar="BYTES", help="Most that may be on the device: 16GB, 16GiB, 60% of the unplanned peak; min: as little as can be.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Where to write the plan.  [default: memopt-SCRIPT.plan.json]")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Overwrite the file, whoever wrote it.")
@click.option("--device", type=DeviceName(), metavar="NAME", help="Plan for this GPU with modelled times, such as a100-40gb; without --budget for what it has room for.")  # fmt: skip
@click.option("--strategy", "strategies", metavar="NAME", multiple=True, help="Who plans (memopt strategies lists them); several: a comparison.  [default: auto]")  # fmt: skip
@click.option("--variant", metavar="NAME", help="With --strategy vdnn: all, conv or dyn; with dtr: eqclass, local or megengine.")  # fmt: skip
@click.option(
    "--allow",
    metavar="KINDS",
    multiple=True,
    help=f"Only these kinds of action: {_KINDS}; besides them lossy (no action is) and model-change (ctdr's advice).",
)
@click.option("--deny", metavar="KINDS", multiple=True, help="None of these kinds of action.")
@click.option("--time-limit", "time_limit_s", type=Real(min=0.1, max=86400), default=None, metavar="SECONDS", help="How long to search, in seconds of the processor; up to four times that in all where the optimizer may step in pieces, or backward may write over gradients.  [default: 8, more beyond 8,000 ops]")  # fmt: skip
@click.option("--max-overhead", metavar="SHARE", help="Find the lowest peak that costs at most this much time: 10%.")  # fmt: skip
@click.option("--pareto", is_flag=True, help="Plan for budgets from 90% down and show peak against step time.")  # fmt: skip
@click.option("--max-batch", is_flag=True, help="Find the largest batch that fits the budget, without a plan and with one.")  # fmt: skip
@click.option("--batch-arg", metavar="FLAG", help="With --max-batch: the script's own flag for the batch size, such as --batch-arg=--bs.")  # fmt: skip
@click.option("--explain", metavar="TENSOR", help="Also say why this tensor is treated as it is (part of its name, or its number).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write the figures as JSON.")
@click.option(
    "--top", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Rows a table."
)
@click.option("--graph", metavar="FILE", type=click.Path(path_type=Path), help="Plan a plain graph (memopt.graph/1) instead of a profile.")  # fmt: skip
@click.option("--schedule", metavar="FILE", type=click.Path(path_type=Path), help="With --graph: where to write the schedule.")  # fmt: skip
@click.option("--out-gbps", metavar="RATE", type=Real(min=0), help="With --graph: link to the host, GB/s.  [default: as --in-gbps, else no link]")  # fmt: skip
@click.option("--in-gbps", metavar="RATE", type=Real(min=0), help="With --graph: link from the host, GB/s.  [default: as --out-gbps, else no link]")  # fmt: skip
@click.argument("profile", required=False, type=click.Path(path_type=Path))
def advise(**options: Any) -> int:
    """Find what to swap, recompute or compress so that a script fits a budget.

    PROFILE is what memopt profile wrote; left out, the newest one in the current folder is taken.
    """
    request = AdviseRequest(**options)
    request = replace(request, strategies=with_variant(request.strategies, request.variant))
    return _of_a_profile(request) if request.graph is None else _of_a_graph(request)


def _of_a_profile(request: AdviseRequest) -> int:
    from memopt.advisors.registry import counsels

    check_words(request)
    check_of_profiles(request)
    advises = len(request.strategies) == 1 and request.strategies[0] in counsels()
    request = room_as_budget(request)
    if not advises and not request.max_batch:
        if request.batch_arg:
            raise UsageError("--batch-arg goes with --max-batch", try_="--max-batch --budget 16GB")
        check_goal(request)
    request = replace(request, profile=request.profile or newest_profile(Path.cwd()))
    if advises:
        from memopt.cli.advise.counsel import study

        return study(request)
    if request.max_batch:
        from memopt.cli.advise.max_batch import max_batch

        return max_batch(request)
    if request.pareto:
        from memopt.cli.advise.pareto import pareto

        return pareto(request)
    if len(request.strategies) > 1:
        from memopt.cli.advise.comparison import compare_strategies

        return compare_strategies(request)
    from memopt.cli.advise.one_plan import one_plan

    return one_plan(request)


def newest_profile(folder: Path) -> Path:
    """The profile in `folder` that was written last, which is said on stderr. Raises `UsageError` when there is none."""
    found = sorted(folder.glob("*.profile.json.gz"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(
            "there is no profile in the current folder",
            why="*.profile.json.gz is what memopt profile writes",
            try_="memopt profile SCRIPT, or memopt advise PROFILE",
        )
    from memopt.cli.shared.console import say

    say(f"using {found[-1].name}, the newest profile here")
    return found[-1].relative_to(folder)


def _of_a_graph(request: AdviseRequest) -> int:
    check_graph_words(request)
    if request.budget is None:
        raise UsageError("--budget is missing", try_="--budget 16GB, or --budget 60% of the unplanned peak")
    from memopt.cli.advise.graph_plan import advise_graph

    try:
        return advise_graph(
            request.source,
            budget=request.budget,
            schedule=request.schedule,
            out_gbps=request.out_gbps,
            in_gbps=request.in_gbps,
            allow=request.allow,
            deny=request.deny,
            strategies=request.strategies,
            time_limit_s=request.time_limit_s,
            force=request.force,
            as_json=request.as_json,
        )
    except BudgetInfeasible as error:
        raise with_command(error, request) from None
