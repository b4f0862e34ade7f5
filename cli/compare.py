"""`memopt compare`: two profiles, plans, outcomes or estimates beside each other, and a gate for continuous integration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memopt.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memopt.reports.comparison import Comparison


@click.command()
@click.option("--fail-above", metavar="SHARE", help="Exit with 3 when the peak of AFTER is more than this above BEFORE's: 5%, or 200MB.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["terminal", "markdown", "json"]), default="terminal", show_default=True, help="How to tell it.")  # fmt: skip
@click.option("--top", metavar="N", type=click.IntRange(min=1), default=8, show_default=True, help="Rows a table.")  # fmt: skip
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
def compare(before: Path, after: Path, fail_above: str | None, form: str, top: int) -> int:
    """Tell what AFTER needs more than BEFORE, and where.

    Both may be a profile (its peak), a plan (predicted), an outcome of memopt apply (measured) or what
    memopt estimate --json printed. memopt report BEFORE AFTER shows two profiles as a page.
    """
    from memopt.reports import comparison

    allowed = _allowed(fail_above) if fail_above is not None else None
    found = comparison.compare(before, after)
    if form == "json":
        click.echo(json.dumps(found.as_json(), indent=2))
    elif form == "markdown":
        click.echo(_markdown(found, top))
    else:
        from memopt.cli.shared.console import out

        out().print(_rendered(found, top))
    if allowed is not None:
        _gate(found, *allowed, files=f"{before} {after}")
    return 0


def _allowed(text: str) -> tuple[float | None, int]:
    """(share, bytes) by which the peak may grow; the share is None where bytes were given."""
    from memopt.units import parse_budget

    if not text.strip().endswith("%"):
        return None, 0 if text.strip() == "0" else parse_budget(text, option="--fail-above")
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1e6:
        raise UsageError(
            f"--fail-above '{text}' is not understood", try_="--fail-above 5%, or --fail-above 200MB"
        )
    return share, 0


def _gate(found: Comparison, share: float | None, room_bytes: int, files: str) -> None:
    from memopt.units import format_bytes

    most = room_bytes if share is None else int(share * found.before.peak_bytes)
    if found.peak.change > most:
        limit = format_bytes(room_bytes) if share is None else f"{100 * share:g} %"
        raise GateFailed(
            f"the peak grew by {format_bytes(int(found.peak.change))}, more than the {limit} that --fail-above allows",
            why=_why(found),
            try_=f"memopt report {files}, to see where, or a higher --fail-above",
        )


def _why(found: Comparison) -> str:
    from memopt.reports.comparison import rows_of

    for part in ("line", "module", "category"):
        grown = [
            row
            for row, d in zip(rows_of(found.parts.get(part, [])), found.parts.get(part, []), strict=True)
            if d.change > 0
        ]
        if grown:
            return "most of it: " + ", ".join(f"{name} {change}" for name, _, _, change in grown[:3])
    return found.words


_TITLES = {
    "category": "By kind, at the peak",
    "module": "By module, at the peak",
    "line": "By line, at the peak",
}


def _rendered(found: Comparison, top: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from memopt.reports.comparison import rows_of
    from memopt.reports.tables import Name, plain_table, words

    before, after = found.before, found.after
    parts: list[RenderableType] = [
        words(f"{before.kind} {before.name} against {after.kind} {after.name}", style="dim"),
        words(found.words, style="bold red" if found.peak.change > 0 else "bold green"),
    ]
    heads = [("", "name"), ("before", "right"), ("after", "right"), ("change", "right")]
    main = plain_table("", heads)
    for row in rows_of([found.peak]) + (rows_of([found.step], time=True) if found.step else []):
        main.add_row(*row)
    parts.append(main)
    for part, deltas in found.parts.items():
        table = plain_table(_TITLES[part], heads)
        for name, *figures in rows_of(deltas[:top]):
            table.add_row(Name(name), *figures)
        parts += [Text(), table]
        if len(deltas) > top:
            parts.append(Text(f"({len(deltas) - top} more)", style="dim"))
    return Group(*parts)


def _markdown(found: Comparison, top: int) -> str:
    from memopt.reports.comparison import rows_of
    from memopt.reports.formats.markdown import escaped, table

    heads = ("", found.before.name, found.after.name, "change")
    rows = rows_of([found.peak]) + (rows_of([found.step], time=True) if found.step else [])
    parts = [f"### {escaped(found.words)}", table(heads, rows)]
    for part, deltas in found.parts.items():
        parts += [f"**{_TITLES[part]}**", table(heads, rows_of(deltas[:top]))]
    return "\n\n".join(parts)
