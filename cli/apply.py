"""`memopt apply`: run the script of a plan with the plan enforced, and tell predicted beside measured."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memopt.cli.device_here import require_device
from memopt.cli.on_oom import leaving_traces
from memopt.errors import BadFile, MemoptError, NotEnforced, NotPossibleHere, RunFailed, UsageError, reason
from memopt.plan import ALLOCATOR_VARIABLES

if TYPE_CHECKING:
    from memopt.enforcers.session import ApplySession
    from memopt.instrument.runner import Command
    from memopt.outcome import Outcome
    from memopt.plan import Plan


@click.command()
@click.option("--outcome", "outcome_path", metavar="FILE", type=click.Path(path_type=Path), help="Write predicted and measured figures there, as JSON; %r in it is the rank.")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Overwrite the outcome file if it exists.")
@click.option("--verify", "verify_steps", metavar="N", type=click.IntRange(min=1), help="Run N iterations plain and N enforced and compare them bit for bit; exit 1 on any difference. Measures no peak.")  # fmt: skip
@click.option(
    "--deterministic", is_flag=True, help="With --verify: both runs use torch's deterministic algorithms."
)
@click.option(
    "--hold",
    is_flag=True,
    help="On a GPU: let the allocator have no more than the budget, so that a run that would pass it fails there.",
)
@click.option("--strict", is_flag=True, help="Refuse when the script has changed since it was profiled; exit 4 when nothing of the plan could be enforced.")  # fmt: skip
@click.option("--swap-dir", metavar="DIR", type=click.Path(path_type=Path), help="The folder for the swap file.  [default: the system's for temporary files]")  # fmt: skip
@click.option("--no-measure", is_flag=True, help="Do not measure the peak: on a CPU that slows a few iterations and takes memory of its own.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Say nothing at the end.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, metavar="[-- ARGS]...", type=click.UNPROCESSED)
def apply(
    outcome_path: Path | None,
    force: bool,
    verify_steps: int | None,
    deterministic: bool,
    hold: bool,
    strict: bool,
    swap_dir: Path | None,
    no_measure: bool,
    quiet: bool,
    plan: Path,
    args: tuple[str, ...],
) -> int:
    """Run the script of PLAN as it was profiled, with the plan enforced.

    ARGS, after --, take the place of the script's own arguments. The script's output, exit code and
    signals stay its own; at the end stderr tells the measured peak and step time beside the predicted.
    """
    from memopt.cli.console import say
    from memopt.cli.ranks import path_of_rank
    from memopt.enforcers.memory_limit import limit_of
    from memopt.enforcers.session import ApplySession, Options
    from memopt.files import refuse_overwrite, swap_folder
    from memopt.plan import load_plan

    if outcome_path is not None:
        outcome_path = path_of_rank(str(outcome_path), ".json")
        refuse_overwrite(outcome_path, force=force)
    plan_path = plan.absolute()
    loaded = load_plan(plan_path)
    for said in prepare_run(loaded, os.environ):
        say(said)
    require_device(
        loaded.device.kind,
        f"this plan is for another device: {loaded.device.name or loaded.device.kind}",
        try_="memopt apply on a machine that has it, or memopt advise without --device for this one",
    )
    folder = swap_folder(swap_dir)
    command = command_to_run(loaded, args)
    for warning in _doubts(loaded, command, strict=strict):
        say(warning)
    if verify_steps is not None:
        return _verify(plan_path, command, verify_steps, folder, outcome_path, deterministic=deterministic)
    if deterministic:
        raise UsageError(
            "--deterministic goes with --verify",
            why="a run under a plan uses the algorithms that the script asks for",
            try_="--verify 3 --deterministic",
        )
    limit_bytes = limit_of(loaded) if hold else 0
    session = ApplySession(loaded, Options(swap_dir=folder, measure=not no_measure, limit_bytes=limit_bytes))
    return _run(session, command, outcome_path, quiet=quiet, strict=strict)


def prepare_run(plan: Plan, environment: MutableMapping[str, str]) -> list[str]:
    """Set what the plan's allocator actions set, unless the user did; what was done. Raises `NotPossibleHere` for mere advice."""
    said = []
    for action in plan.script_actions:
        if not action.can_be_applied:
            raise NotPossibleHere(
                f"this plan asks for {action.what}, which memopt advises but cannot do",
                why=f"nothing enforces it ({action.why})",
                try_="memopt advise PROFILE --budget B, for a plan that can be applied",
            )
        for name, value in action.variables.items():
            chosen = next((environment[n] for n in ALLOCATOR_VARIABLES if environment.get(n)), None)
            if chosen is None:
                environment[name] = value
            said.append(
                f"{name}={value}, as planned" if chosen is None else f"kept your allocator settings, {chosen}"
            )
    return said


def command_to_run(plan: Plan, args: tuple[str, ...]) -> Command:
    """The plan's script with its own arguments or `args`, from its own folder. Raises when it is not there any more."""
    from memopt.instrument.runner import Command, find_source

    try:
        os.chdir(plan.script.cwd)
    except OSError as error:
        raise BadFile(
            f"the plan's working directory {plan.script.cwd} cannot be entered",
            why=reason(error),
            try_="memopt profile in the present directory, then advise again",
        ) from error
    command = Command((plan.script.argv[0], *(args or plan.script.argv[1:])), plan.script.as_module)
    find_source(command)
    return command


def _doubts(plan: Plan, command: Command, *, strict: bool) -> list[str]:
    """What is different from the run that was profiled. With `strict`, a changed script is refused."""
    from importlib.metadata import PackageNotFoundError, version

    from memopt.instrument.runner import find_source

    doubts = []
    found = hashlib.sha256(find_source(command).read_bytes()).hexdigest()
    if strict and not plan.script.sha256:
        raise UsageError(
            "the plan does not tell which script it was made for",
            why="its sha256 is empty, and --strict refuses a plan for another script",
            try_="memopt advise again, or apply without --strict",
        )
    if plan.script.sha256 and found != plan.script.sha256:
        if strict:
            raise UsageError(
                f"{command.argv[0]} has changed since it was profiled",
                why="--strict refuses a plan for another script",
                try_="memopt profile and memopt advise again, or apply without --strict",
            )
        doubts.append(
            f"{command.argv[0]} has changed since it was profiled; what is found again by name is enforced, the rest is kept"
        )
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    if plan.script.torch and installed and plan.script.torch.split("+")[0] != installed.split("+")[0]:
        doubts.append(f"the profile was made with torch {plan.script.torch}, this is {installed}")
    return doubts


def _verify(
    plan_path: Path,
    command: Command,
    steps: int,
    swap_dir: Path,
    outcome_path: Path | None,
    *,
    deterministic: bool,
) -> int:
    from memopt.cli.console import out, progress, say
    from memopt.enforcers.verify import verify

    with progress(f"running {steps} iterations plain and {steps} enforced"):
        verified = verify(plan_path, list(command.argv), steps, swap_dir, deterministic=deterministic)
    same = f"losses, gradients, parameters and buffers of {verified.iterations} iterations, bit for bit"
    out().print(f"identical: {same}")
    if verified.outcome is None:
        say("what the plan did is not known: the script ended without letting anybody look back")
    else:
        counts = verified.outcome.actions
        if outcome_path is not None:
            verified.outcome.save(outcome_path)
        if counts.planned:
            say(f"{counts.done} of {counts.planned} actions were taken")
    if verified.iterations < steps:
        say(
            f"the script ended by itself after {verified.iterations} of {steps} iterations, with exit code {verified.exit_code}"
        )
    return 0


def _run(
    session: ApplySession, command: Command, outcome_path: Path | None, *, quiet: bool, strict: bool
) -> int:
    from memopt.cli.console import outlive_the_scripts_stderr, say
    from memopt.instrument import runner
    from memopt.instrument.on_import import call_after_import
    from memopt.instrument.signals import before_terminating

    failed: list[int] = []

    def end() -> None:
        outlive_the_scripts_stderr()
        outcome = session.finished()
        if outcome is None:
            return
        if outcome_path is not None:
            try:
                outcome.save(outcome_path)
            except MemoptError as error:
                failed.append(RunFailed.exit_code)
                say(str(error))
        if not quiet:
            from memopt.cli.console import err
            from memopt.reports.outcome import render_outcome

            err().print(render_outcome(outcome))
        if outcome.actions.planned and not outcome.actions.done:
            plain = not_enforced(outcome)
            if strict:
                failed.append(plain.exit_code)
            if strict or not quiet:
                say(str(plain))

    def listen() -> None:
        before_terminating(end)

    call_after_import("torch", listen)
    session.install()
    pid = os.getpid()
    try:
        code = runner.run(command, raised=leaving_traces(command))
    except KeyboardInterrupt:
        end()
        runner.die_of(signal.SIGINT)
    if os.getpid() != pid:
        runner.leave_child(code)
    end()
    return code or (failed[0] if failed else 0)


def not_enforced(outcome: Outcome) -> NotEnforced:
    """What to say when none of the plan's actions was taken."""
    why = "; ".join(outcome.notes)
    if not outcome.steps:
        why = "no iteration of training was seen in this process"
    return NotEnforced(
        f"nothing of the plan was enforced: 0 of {outcome.actions.planned} actions",
        why=why or "the run did not call what the profile saw",
        try_="memopt profile and memopt advise again, for the script as it is now",
    )
