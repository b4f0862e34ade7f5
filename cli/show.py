"""`memopt show`: what a profile or plan holds, in words first."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import msgspec

from memopt.errors import BadFile
from memopt.files import read_bytes
from memopt.plan import Plan, load_plan
from memopt.trace import Trace, load_trace


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
        from memopt.reports.summary import encode, summarize_plan, summarize_trace

        click.echo(
            encode(
                summarize_plan(found, top=top) if isinstance(found, Plan) else summarize_trace(found, top=top)
            )
        )
        return
    from memopt.cli.console import out, say
    from memopt.reports.terminal import render_plan, render_trace

    if isinstance(found, Plan):
        out().print(render_plan(found, top=top))
        if (found.actions or found.script_actions) and all(a.can_be_applied for a in found.script_actions):
            say(f"next: memopt apply {shlex.quote(str(file))}")
        return
    out().print(render_trace(found, top=top))
    if not found.partial and found.op_count:
        from memopt.advisors.lints import find_lints
        from memopt.cli.advise_tables import lints_table

        lints = find_lints(found)
        if lints:
            out().print(lints_table(lints))
        say(f"next: memopt advise {shlex.quote(str(file))} --budget 80%")


class _AnySchema(msgspec.Struct):
    schema: str = ""


def load(path: Path) -> Trace | Plan:
    """The profile or plan at `path`, told apart by the schema inside. Raises `BadFile` for anything else."""
    data = read_bytes(path, "profile or plan")
    try:
        schema = msgspec.json.decode(data, type=_AnySchema).schema
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
