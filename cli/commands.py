"""The command group that imports a command only when it is run, so that `memopt --help` stays instant.

To add a command: one file `cli/<name>.py` with a click command of that name, and one line in `COMMANDS`.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from memopt.errors import NotPossibleHere, UsageError


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


class LazyGroup(click.Group):
    """A group whose commands are listed from `COMMANDS` and imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a suggestion for a typo and with `[tool.memopt]` as the command's defaults."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        name_or_none, command, rest = super().resolve_command(ctx, args)
        if command is not None and name_or_none is not None and not ctx.resilient_parsing:
            from memopt.cli.shared.config import defaults_for

            ctx.default_map = {name_or_none: defaults_for(name_or_none, command)}
        return name_or_none, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """As click does; an error in a value says where the value was set, when that was not the command line."""
        try:
            return super().invoke(ctx)
        except (UsageError, click.BadParameter) as error:
            from memopt.cli.shared.config import told_with_origin

            raise told_with_origin(error, ctx.invoked_subcommand) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names from the table, so that a TAB imports nothing."""
        names = [
            CompletionItem(name, help=lazy.help)
            for name, lazy in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


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
