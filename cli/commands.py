"""The command group that imports a command only when it is run, so that `memopt --help` stays instant."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import click
from click.shell_completion import CompletionItem

from memopt.cli.table import COMMANDS, load
from memopt.errors import UsageError


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
