"""`memopt show`: what a profile or plan holds, in words first."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from memopt.errors import BadFile
from memopt.files import read_bytes
from memopt.plan import Plan, load_plan
from memopt.trace import Trace, load_trace
from memopt.versioned import schema_of

if TYPE_CHECKING:
    from memopt.advisors.lints.registry import Lint


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write the figures as JSON.")
@click.option(
    "--top", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Rows a table."
)
@click.argument("file", metavar="PROFILE|PLAN", type=click.Path(path_type=Path))
def show(as_json: bool, top: int, file: Path) -> None:
    """Say in words what a profile or plan holds."""
    found = load(file)
    if as_json:
        from memopt.reports.formats.summary import encode, summarize_plan, summarize_trace

        if isinstance(found, Plan):
            figures = summarize_plan(found, top=top)
        else:
            figures = summarize_trace(found, top=top) | {"lints": msgspec.to_builtins(_lints(found))}
        click.echo(encode(figures))
        return
    from memopt.cli.shared.console import out, say
    from memopt.reports.terminal import render_plan, render_trace

    if isinstance(found, Plan):
        out().print(render_plan(found, top=top))
        if (found.actions or found.script_actions) and all(a.can_be_applied for a in found.script_actions):
            say(f"next: memopt apply {shlex.quote(str(file))}")
        return
    out().print(render_trace(found, top=top))
    lints = _lints(found)
    if lints:
        from memopt.cli.advise.tables import lints_table

        out().print(lints_table(lints))
    if not found.partial and found.op_count:
        from memopt.advisors.first_budget import first_budget

        say(f"next: memopt advise {shlex.quote(str(file))} --budget {first_budget(found)}")


def _lints(trace: Trace) -> list[Lint]:
    """What could be better in the script; a recording that is not whole does not tell."""
    from memopt.advisors.lints.find import find_lints

    return [] if trace.partial else find_lints(trace)


def load(path: Path) -> Trace | Plan:
    """The profile or plan at `path`, told apart by the schema inside. Raises `BadFile` for anything else."""
    data = read_bytes(path, "profile or plan")
    try:
        schema = schema_of(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(
            f"{path} is neither a profile nor a plan",
            why=str(error) or "it is nested too deeply",
            try_="a file that memopt profile or memopt advise wrote",
        ) from error
    family = schema.rpartition("/")[0]
    if family == "memopt.plan":
        return load_plan(path)
    if family == "memopt.trace":
        return load_trace(path)
    raise BadFile(
        f"{path} is neither a profile nor a plan",
        why=f"its schema is '{schema[:60]}'" if schema else "it has no schema",
        try_="a file that memopt profile or memopt advise wrote",
    )
