"""`memopt report`: files of memopt's -> a page to look at, or a form that another program reads."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from memopt.errors import UsageError

FORMATS = ("html", "perfetto", "memory-viz", "csv", "parquet", "json", "markdown", "png")

_HEAD_BYTES = 4096
"""Of a page: what tells who made it is among them."""


@click.command()
@click.option("-o", "--output", metavar="FILE", help="Where to write it; - is stdout.  [default: memopt-NAME.report.html]")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Overwrite the file if it exists.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="html", show_default=True, help="What to write.")  # fmt: skip
@click.option("--open", "and_open", is_flag=True, help="Open the page in a browser.")
@click.option("--no-source", is_flag=True, help="Leave out lines, paths and arguments of the script.")
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
def report(
    paths: tuple[Path, ...], output: str | None, force: bool, form: str, and_open: bool, no_source: bool
) -> int:
    """Show profiles, plans, outcomes, estimates and torch's memory snapshots as one HTML page.

    The page is one file that opens offline. A plan is laid on its profile; of two profiles the page shows
    what changed.
    """
    from memopt.cli.shared.console import progress, say
    from memopt.files import refuse_overwrite, write_atomic
    from memopt.reports.formats.export import FORMATS as ENDINGS
    from memopt.reports.formats.export import exported
    from memopt.reports.inputs import read_inputs

    to_stdout = output == "-"
    path = Path(output) if output and not to_stdout else Path(f"memopt-{_stem(paths[0])}.{ENDINGS[form]}")
    if and_open and (to_stdout or form != "html"):
        raise UsageError("--open opens a page that was written to a file", try_="memopt report --open FILE")
    if to_stdout and sys.stdout is None:
        raise UsageError("cannot write to stdout", why="it is closed", try_="-o FILE")
    if not to_stdout:
        _refuse_input(path, paths)
        refuse_overwrite(path, force=force or (output is None and _is_own_page(path)))
    with progress(f"reading {', '.join(each.name for each in paths)}", short=True):
        data = exported(
            read_inputs(list(paths)), [each.name for each in paths], form, with_source=not no_source
        )
    if to_stdout:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return 0
    write_atomic(path, data)
    say(f"wrote {path}")
    if and_open:
        _open(path)
    elif form == "html":
        again = f", or memopt report --open {shlex.join(map(str, paths))}" if len(paths) <= 3 else ""
        say(f"next: open it in a browser{again}")
    return 0


def _refuse_input(path: Path, inputs: tuple[Path, ...]) -> None:
    """A report takes the place of no file that it is made of, be that forced."""
    for each in inputs:
        if path.exists() and each.exists() and path.samefile(each):
            raise UsageError(
                f"the report would overwrite {each}, which it is made of",
                try_=f"-o {path.stem}.html, or any other name",
            )


def _is_own_page(path: Path) -> bool:
    """Is it a page that memopt has made?"""
    try:
        with path.open("rb") as file:
            return b'<meta name="generator" content="memopt ' in file.read(_HEAD_BYTES)
    except OSError:
        return False


def _stem(path: Path) -> str:
    """`train` of `memopt-train.profile.json.gz`."""
    name = path.name.removeprefix("memopt-").partition(".")[0]
    return name or "report"


def _open(path: Path) -> None:
    import webbrowser

    from memopt.cli.shared.console import say

    if not webbrowser.open(path.absolute().as_uri()):
        say("no browser could be opened; the file is there to be opened by hand")
