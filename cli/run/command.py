"""`memopt run`: profile, advise and apply in one process and one run of the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memopt.cli.requests import RunRequest
from memopt.cli.shared.device_here import require_device
from memopt.cli.shared.numbers import Real
from memopt.cli.shared.swap_dir import require_folder
from memopt.errors import UsageError


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--budget", "-b", metavar="BYTES", help="Most that may be on the device: 16GB, 16GiB, 60% of the unplanned peak (with --online bytes only).  [default: what it has free]")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=None, help="Whose memory it is.  [default: where the parameters are]")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Record, stop the script and show the plan; enforce nothing.")
@click.option("--online", is_flag=True, help="Make no plan: move saved tensors away, and optimizer state, whenever the budget would be passed.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Record again, whatever .memopt/ knows of this command.")
@click.option("--swap-dir", metavar="DIR", type=click.Path(path_type=Path), help="The folder for the swap file.  [default: the system's for temporary files]")  # fmt: skip
@click.option("--allow", metavar="KINDS", multiple=True, help="Only these kinds of action, as in memopt advise.")  # fmt: skip
@click.option("--deny", metavar="KINDS", multiple=True, help="None of these kinds of action.")
@click.option("--time-limit", "time_limit_s", type=Real(min=0.1, max=86400), default=None, metavar="SECONDS", help="How long to search for a better plan, while the script goes on under its first one; up to four times that where the optimizer may step in pieces, or backward may write over gradients.  [default: 8, more beyond 8,000 ops]")  # fmt: skip
@click.option("--outcome", "outcome_path", metavar="FILE", type=click.Path(path_type=Path), help="Write what came of it there, as JSON; %r in it is the rank.")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Overwrite the outcome file if it exists.")
@click.option("--no-measure", is_flag=True, help="Do not measure the peak: on a CPU that slows a few iterations and takes memory of its own.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Say nothing at the end.")
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(**options: Any) -> int:
    """Run a training SCRIPT within a memory budget, with the same results.

    SCRIPT runs once, unmodified, with all that follows it as its own arguments; output, exit code and signals stay its
    own. Its first iterations are recorded, a plan is made while it goes on, and then enforced. What was found out is
    kept in .memopt/, so that the next run starts enforced.
    """
    from memopt.advisors.kinds import kinds_named
    from memopt.cli.run.one_run import Run
    from memopt.cli.shared.as_typed import command_as_typed
    from memopt.cli.shared.ranks import path_of_rank
    from memopt.files import refuse_overwrite
    from memopt.instrument.script.command import find_source

    request = RunRequest(**options)
    _check(request)
    command = command_as_typed((request.script, *request.args), as_module=request.as_module)
    find_source(command)
    kinds_named(request.allow)
    kinds_named(request.deny)
    outcome_path = request.outcome_path
    if outcome_path is not None:
        outcome_path = path_of_rank(str(outcome_path), ".json")
        refuse_overwrite(outcome_path, force=request.force)
    if request.online and request.dry_run:
        raise UsageError("--dry-run shows a plan, and --online makes none", try_="one of the two")
    if request.dry_run:
        from memopt.cli.run.dry import dry_run

        return dry_run(command, request)
    return Run(request, command, outcome_path).run()


def _check(request: RunRequest) -> None:
    """Raises `UsageError` for what cannot be meant, before anything runs."""
    from memopt.units import parse_budget

    if request.budget is not None:
        parse_budget(request.budget, of_bytes=None if request.online else 2**40)
    if request.device is not None:
        require_device(request.device, f"nothing can be held on {request.device}", try_="memopt run without --device")  # fmt: skip
    require_folder(request.swap_dir)
