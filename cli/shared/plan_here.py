"""A plan in this place: what it sets, which script it runs in which folder, and what is different from the run that was profiled."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memopt.errors import BadFile, NotPossibleHere, UsageError, reason
from memopt.plan import ALLOCATOR_VARIABLES

if TYPE_CHECKING:
    from memopt.instrument.script.command import Command
    from memopt.plan import Plan


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


def command_to_run(plan: Plan, args: tuple[str, ...], cwd: Path | None = None) -> Command:
    """The plan's script with its own arguments or `args`, from its own folder or from `cwd`.

    A plan may come from anywhere: outside the present folder a person is asked first. Raises when the script is not there any more.
    """
    from memopt.instrument.script.command import Command, find_source

    folder = cwd if cwd is not None else Path(plan.script.cwd)
    if cwd is None:
        _ask_about(folder, plan)
    try:
        os.chdir(folder)
    except OSError as error:
        raise BadFile(
            f"the plan's working directory {folder} cannot be entered",
            why=reason(error),
            try_="--cwd DIR, the folder that the script is run in here (--cwd . is the present one)",
        ) from error
    command = Command((plan.script.argv[0], *(args or plan.script.argv[1:])), plan.script.as_module)
    if not (command.as_module or Path(command.argv[0]).exists()):
        raise UsageError(
            f"the plan's script {command.argv[0]} is not in {Path.cwd()}",
            why="that is where the plan says that it runs; a plan that was moved alone has left it behind",
            try_="--cwd DIR, the folder that the script is run in",
        )
    find_source(command)
    return command


def _ask_about(folder: Path, plan: Plan) -> None:
    """Raise `UsageError` unless `folder` is the present one, or in it, or somebody at the terminal says yes."""
    here, there = Path.cwd().resolve(), folder.resolve()
    if there.is_relative_to(here) or not there.is_dir():
        return
    words = shlex.join(plan.script.argv)
    # each of several ranks would ask, and one be answered
    alone = os.environ.get("WORLD_SIZE", "1") in ("", "0", "1")
    if alone and sys.stdin.isatty() and sys.stderr.isatty():
        if click.confirm(f"memopt: the plan runs {words} in {there}; go on?", err=True):
            return
        raise UsageError("nothing was run", why="you said no", try_=f"--cwd {shlex.quote(str(there))}")
    raise UsageError(
        f"the plan runs {words} in another folder, {there}",
        why="a plan names a program to run, and nobody can be asked whether it is the one that is meant",
        try_=f"--cwd {shlex.quote(str(there))}",
    )


def doubts(plan: Plan, command: Command, *, changed_script: bool) -> list[str]:
    """What is different from the run that was profiled. Another script is refused, unless that is what is wanted."""
    from importlib.metadata import PackageNotFoundError, version

    from memopt.instrument.script.command import find_source

    found = []
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if plan.script.world not in (0, world):
        found.append(
            f"the plan was made for a run of {plan.script.world} process{'es' if plan.script.world > 1 else ''}, this is one of {world}: "
            "shards and batches may have other sizes"
        )
    sha256 = hashlib.sha256(find_source(command).read_bytes()).hexdigest()
    if sha256 != plan.script.sha256:
        known = bool(plan.script.sha256)
        what = (
            "has changed since it was profiled"
            if known
            else "may be any script: the plan holds no hash of its own"
        )
        if not changed_script:
            raise UsageError(
                f"{command.argv[0]} {what}",
                why="a plan is made for one script",
                try_="memopt profile and memopt advise again, or --changed-script: what is found again by name is enforced then",
            )
        found.append(f"{command.argv[0]} {what}; what is found again by name is enforced, the rest is kept")
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    if plan.script.torch and installed and plan.script.torch.split("+")[0] != installed.split("+")[0]:
        found.append(f"the profile was made with torch {plan.script.torch}, this is {installed}")
    return found
