"""Tables for a terminal. Numbers are never cut; only names shrink, and from the left, where paths are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from memopt.reports.moment import Held
from memopt.units import format_bytes, format_ms

COLORS = {
    "parameter": "blue",
    "gradient": "cyan",
    "optimizer state": "magenta",
    "buffer": "bright_blue",
    "input": "green",
    "activation": "yellow",
    "temporary": "red",
    "workspace": "bright_black",
}
_NARROWEST = 14
_BAR_WIDTH = 16


class Name:
    """A name that loses its head, not its tail, where there is no room: `…ks.3.mlp · gelu · 4×1024 fp32`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shorten(self.text, options.max_width), no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = Text(self.text).cell_len
        return Measurement(min(_NARROWEST, width), width)


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` columns, cut from the left."""
    if Text(text).cell_len <= width:
        return text
    tail = text
    while tail and Text(tail).cell_len > width - 1:
        tail = tail[1:]
    return f"…{tail}"[: max(0, width)]


def plain_table(title: str, columns: Sequence[tuple[str, str]]) -> Table:
    """A table whose columns are (heading, `left`|`right`|`name`)."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading, kind in columns:
        if kind == "name":
            table.add_column(heading)
        else:
            table.add_column(heading, justify="right" if kind == "right" else "left", no_wrap=True)
    return table


def share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"


def shares_table(
    title: str, heading: str, sizes: Mapping[str, int], total: int, most: int, *, colors: bool = False
) -> Table:
    """Name, bytes, share and bar; the smallest are summed in one last row."""
    table = plain_table(title, [("size", "right"), ("share", "right"), ("", "left"), (heading, "name")])
    largest = max(sizes.values(), default=0)
    rows = list(sizes.items())
    for name, size in rows[:most]:
        bar = Text(
            "█" * round(_BAR_WIDTH * size / largest) if largest else "",
            style=COLORS.get(name, "") if colors else "",
        )
        table.add_row(format_bytes(size), share(size, total), bar, Name(name or "(outside any module)"))
    rest = [size for _, size in rows[most:]]
    if rest:
        table.add_row(format_bytes(sum(rest)), share(sum(rest), total), "", Name(f"({len(rest)} more)"))
    return table


def biggest_table(held: Sequence[Held], total: int, most: int, *, lines: bool) -> Table:
    """The biggest tensors of a moment."""
    columns = [
        ("size", "right"),
        ("share", "right"),
        ("kind", "left"),
        ("born at", "right"),
        ("idle", "right"),
        ("tensor", "name"),
    ]
    table = plain_table("Biggest tensors", [*columns, *([("line", "left")] if lines else [])])
    for row in held[:most]:
        cells: list[str | Text | Name] = [
            format_bytes(row.size_bytes),
            share(row.size_bytes, total),
            Text(row.category, style=COLORS.get(row.category, "")),
            "before" if row.born_op < 0 else f"op {row.born_op}",
            format_ms(row.idle_ms) if row.idle_ms else "-",
            Name(row.label),
        ]
        table.add_row(*cells, *([row.line] if lines else []))
    left = held[most:]
    if left:
        size = sum(row.size_bytes for row in left)
        table.add_row(format_bytes(size), share(size, total), "", "", "", Name(f"({len(left)} more)"))
    return table


def pairs_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A row name, then figures."""
    table = plain_table(title, [(columns[0], "left"), *((name, "right") for name in columns[1:])])
    for row in rows:
        table.add_row(*row)
    return table
