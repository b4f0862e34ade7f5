"""`memopt apply`: run the script of a plan with the plan enforced, and tell predicted beside measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.on_oom import leaving_traces
from memopt.cli.requests import ApplyRequest
from memopt.cli.shared.device_here import require_device
from memopt.cli.shared.plan_here import command_to_run, doubts, prepare_run
from memopt.errors import MemoptError, NotEnforced, RunFailed, UsageError
from memopt.files import swap_folder

if TYPE_CHECKING:
    from memopt.enforcers.session import ApplySession, Options
    from memopt.instrument.script.command import Command
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
    "--in-place", is_flag=True, help="With --verify: run in the script's folder itself, not in copies of it."
)
@click.option(
    "--changed-script", is_flag=True, help="Run the script though it is not the one that was profiled."
)
@click.option(
    "--cwd",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder to run the script in.  [default: the plan's]",
)
@click.option(
    "--hold",
    is_flag=True,
    help="On a GPU: let the allocator have no more than the budget, so that a run that would pass it fails there.",
)
@click.option("--strict", is_flag=True, help="Exit 4 when nothing of the plan could be enforced.")
@click.option("--swap-dir", metavar="DIR", type=click.Path(path_type=Path), help="The folder for the swap file.  [default: the system's for temporary files]")  # fmt: skip
@click.option("--no-measure", is_flag=True, help="Do not measure the peak: on a CPU that slows a few iterations and takes memory of its own.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Say nothing at the end.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, metavar="[-- ARGS]...", type=click.UNPROCESSED)
def apply(**options: Any) -> int:
    """Run the script of PLAN as it was profiled, with the plan enforced. %r in PLAN is the rank.

    ARGS, after --, take the place of the script's own arguments. The script's output, exit code and
    signals stay its own; at the end stderr tells the measured peak and step time beside the predicted.
    """
    request = _checked(ApplyRequest(**options))
    path, plan = _load(request)
    _prepare(plan)
    folder = swap_folder(request.swap_dir)  # as seen from here: the next line changes the folder
    command = command_to_run(plan, request.args, request.cwd)
    _say_before(request, plan, command)
    if request.verify_steps is not None:
        return _verify(request, path, command, request.verify_steps, folder)
    return _enforce(request, plan, command, folder)


def _checked(request: ApplyRequest) -> ApplyRequest:
    """With the outcome's file by its rank. Raises `UsageError` for words that do not go together, and for a file that is there."""
    from memopt.cli.shared.ranks import path_of_rank
    from memopt.files import refuse_overwrite

    if request.in_place and request.verify_steps is None:
        raise UsageError(
            "--in-place goes with --verify",
            why="a run under a plan runs where the script is",
            try_="--verify 3 --in-place",
        )
    if request.deterministic and request.verify_steps is None:
        raise UsageError(
            "--deterministic goes with --verify",
            why="a run under a plan uses the algorithms that the script asks for",
            try_="--verify 3 --deterministic",
        )
    if request.outcome_path is None:
        return request
    outcome_path = path_of_rank(str(request.outcome_path), ".json")
    refuse_overwrite(outcome_path, force=request.force)
    return replace(request, outcome_path=outcome_path)


def _load(request: ApplyRequest) -> tuple[Path, Plan]:
    """The plan that was named, or the one of this rank, and where it is."""
    from memopt.cli.shared.ranks import expand
    from memopt.plan import load_plan

    named = request.plan
    path = named if named.exists() else Path(expand(str(named), os.environ.get("RANK", "")))
    return path.absolute(), load_plan(path.absolute())


def _prepare(plan: Plan) -> None:
    """Set the environment as planned. Raises `NotPossibleHere` for advice, and for another device's plan."""
    from memopt.cli.shared.console import say

    for said in prepare_run(plan, os.environ):
        say(said)
    require_device(
        plan.device.kind,
        f"this plan is for another device: {plan.device.name or plan.device.kind}",
        try_="memopt apply on a machine that has it, or memopt advise without --device for this one",
    )


def _say_before(request: ApplyRequest, plan: Plan, command: Command) -> None:
    from memopt.cli.shared.console import say
    from memopt.cli.shared.ranks import rank_here

    for warning in doubts(plan, command, changed_script=request.changed_script):
        say(warning)
    if not request.quiet and not rank_here():
        say(f"running {command.in_words} in {os.getcwd()}")


def _enforce(request: ApplyRequest, plan: Plan, command: Command, folder: Path) -> int:
    """Run the script under the plan, and tell what came of it."""
    from memopt.enforcers.memory_limit import limit_of
    from memopt.enforcers.session import ApplySession, Options

    options = Options(
        swap_dir=folder,
        measure=not request.no_measure,
        limit_bytes=limit_of(plan) if request.hold else 0,
    )
    session = ApplySession(plan, options)
    return _Enforced(request, plan, session, Told(plan, options, session)).run(command)


def _verify(request: ApplyRequest, plan_path: Path, command: Command, steps: int, folder: Path) -> int:
    from memopt.cli.shared.console import out, progress, say
    from memopt.enforcers.verify.compare import verify

    with progress(f"running {steps} iterations plain and {steps} enforced"):
        verified = verify(
            plan_path,
            list(command.argv),
            steps,
            folder,
            deterministic=request.deterministic,
            in_place=request.in_place,
        )
    same = f"losses, gradients, parameters and buffers of {verified.iterations} iterations, bit for bit"
    out().print(f"identical: {same}")
    if verified.outcome is None:
        say("what the plan did is not known: the script ended without letting anybody look back")
    else:
        counts = verified.outcome.actions
        if request.outcome_path is not None:
            verified.outcome.save(request.outcome_path)
        if counts.planned:
            say(f"{counts.done} of {counts.planned} actions were taken")
    if verified.left:
        say(f"files left outside of the copies of the folder: {len(verified.left)}, first {verified.left[0]}")
    if verified.iterations < steps:
        say(
            f"the script ended by itself after {verified.iterations} of {steps} iterations, with exit code {verified.exit_code}"
        )
    return 0


class Told:
    """Processes that the script starts run under the plan too; the first that has trained tells its outcome."""

    def __init__(self, plan: Plan, options: Options, session: ApplySession) -> None:
        from memopt.enforcers.child import EnforcesInChild
        from memopt.instrument.script.children import Children, unused_name

        name = unused_name()
        self._outcome, self._claim = name.with_suffix(".outcome"), name.with_suffix(".enforced")
        watcher = EnforcesInChild(plan, options, self._outcome, self._claim)
        self._children = Children(watcher, wanted=lambda: not session.iterations_seen)
        self._children.install()

    def instead_of(self, outcome: Outcome) -> Outcome:
        """`outcome`, or, where nothing was trained in this process, that of the one that trained."""
        from memopt.outcome import load_outcome

        self._children.remove()
        if not outcome.steps and self._outcome.exists():
            outcome = load_outcome(self._outcome)
        for file in (self._outcome, self._claim):
            file.unlink(missing_ok=True)
        return outcome


class _Enforced:
    """A run of the script under a plan, and the last words on it."""

    def __init__(self, request: ApplyRequest, plan: Plan, session: ApplySession, told: Told) -> None:
        self._request, self._plan, self._session, self._told = request, plan, session, told
        self._exit_code = 0
        """Of memopt's own, where it did not do what was asked."""

    def run(self, command: Command) -> int:
        """The exit code; dies of the signal that the script died of."""
        from memopt.instrument.script.runner import run_to_the_end

        self._session.install()
        return run_to_the_end(command, self._end, raised=leaving_traces(command)) or self._exit_code

    def _end(self, how: int) -> None:
        from memopt.cli.shared.console import outlive_the_scripts_stderr, say

        outlive_the_scripts_stderr()
        outcome = self._session.finished(ends=True)
        if outcome is None:
            return
        outcome, quiet = self._told.instead_of(outcome), self._request.quiet
        self._write(outcome)
        if not quiet:
            _tell(outcome)
        role = _another_role(self._plan, outcome)
        if role and not quiet:
            say(role)
        if outcome.actions.planned and not outcome.actions.done:
            plain = not_enforced(outcome, told=not quiet)
            if self._request.strict:
                self._fail(plain.exit_code)
            if self._request.strict or not quiet:
                say(str(plain))

    def _write(self, outcome: Outcome) -> None:
        from memopt.cli.shared.console import say

        if self._request.outcome_path is None:
            return
        try:
            outcome.save(self._request.outcome_path)
        except MemoptError as error:
            self._fail(RunFailed.exit_code)
            say(str(error))

    def _fail(self, exit_code: int) -> None:
        self._exit_code = self._exit_code or exit_code


def _tell(outcome: Outcome) -> None:
    """Predicted beside measured: of this process, or, in the first rank of a machine, of all."""
    from memopt.cli.shared.console import err
    from memopt.cli.shared.ranks import gathered, rank_here
    from memopt.reports.outcome import render_outcome, render_ranks

    outcomes = gathered(outcome)
    if outcomes is None:
        return
    if rank_here() is None:
        err().print(render_outcome(outcome))
    else:
        err().print(render_ranks(outcomes, int(os.environ["WORLD_SIZE"])))


def _another_role(plan: Plan, outcome: Outcome) -> str:
    """Where the run left the plan, and the plan is another rank's: that ranks may do different things, and what to do."""
    from memopt.cli.shared.ranks import rank_here

    rank, planned = rank_here(), plan.script.rank
    left = outcome.divergences or outcome.actions.done < outcome.actions.planned
    if rank is None or planned < 0 or planned == rank or not left:
        return ""
    return (
        f"this plan was made from the profile of rank {planned}, whose part in the run is another: "
        "profile every rank (memopt profile -o NAME-%r.profile.json.gz), plan for each, and memopt apply NAME-%r.plan.json"
    )


def not_enforced(outcome: Outcome, *, told: bool) -> NotEnforced:
    """What to say when none of the plan's actions was taken; the notes of `outcome` may have been `told` before."""
    why = "the notes above say why" if told and outcome.notes else "; ".join(outcome.notes)
    if not outcome.steps:
        why = "no iteration of training was seen in this process"
    return NotEnforced(
        f"nothing of the plan was enforced: 0 of {outcome.actions.planned} actions",
        why=why or "the run did not call what the profile saw",
        try_="memopt profile and memopt advise again, for the script as it is now",
    )
