"""The table of commands, each imported only when it is run.

To add a command: one file `cli/<name>.py` with a click command of that name, and one line in `COMMANDS`.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import click

from memopt.errors import NotPossibleHere


class Lazy(NamedTuple):
    """Where a command lives (`module:attribute`) and the line that lists it."""

    target: str
    help: str


COMMANDS = {
    "run": Lazy(
        "memopt.cli.run.command:run", "Run the script within a memory budget: all of the below in one run."
    ),
    "profile": Lazy("memopt.cli.profile:profile", "Record one steady iteration of a training script."),
    "estimate": Lazy("memopt.cli.estimate:estimate", "Tell the peak memory before anything is run."),
    "advise": Lazy(
        "memopt.cli.advise.command:advise", "Find what to swap, recompute or compress to fit a budget."
    ),
    "apply": Lazy("memopt.cli.apply:apply", "Run the script with a plan enforced."),
    "show": Lazy("memopt.cli.show:show", "Say in words what a profile or plan holds."),
    "report": Lazy("memopt.cli.report:report", "Show profiles and plans as one HTML page, or export them."),
    "compare": Lazy(
        "memopt.cli.compare:compare", "Tell what one run needs more than another; a gate for CI."
    ),
    "live": Lazy("memopt.cli.live:live", "Show a script's memory in the terminal while it runs."),
    "doctor": Lazy("memopt.cli.doctor:doctor", "Tell versions, devices and what is possible here."),
    "strategies": Lazy("memopt.cli.strategies:strategies", "List the planning strategies."),
    "calibrate": Lazy(
        "memopt.cli.calibrate:calibrate", "Measure this machine's link, disk and compute rates."
    ),
}


def load(name: str) -> click.Command:
    """The command `name`; one that says it is not here yet when this build has no such module."""
    module_name, _, attribute = COMMANDS[name].target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        return _absent(name)
    command = getattr(module, attribute)
    assert isinstance(command, click.Command)
    return command


def _absent(name: str) -> click.Command:
    @click.command(
        name,
        help=f"{COMMANDS[name].help} (Not implemented in this build.)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def command(args: tuple[str, ...]) -> Any:
        raise NotPossibleHere(
            f"`memopt {name}` is not implemented in this build",
            why=f"it has no module {COMMANDS[name].target.partition(':')[0]}",
            try_="memopt doctor, which tells what is possible here",
        )

    return command
