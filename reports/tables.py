"""Tables for a terminal. Numbers are never cut; only names shrink, and from the left, where paths are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from memopt.reports.page.moment import Held
from memopt.reports.repeated import gather
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
_JOINT = " · "
_LEAST_PLACE = 12
_NARROWEST = 14
_TIMES_FIT = 72
_LINES_FIT = 120
_BAR_WIDTH = 16


def words(text: str, style: str = "") -> Text:
    """`text` for a terminal: what a hostile file smuggles in (escape sequences) is shown as `?`."""
    return Text("".join(c if c.isprintable() else "?" for c in text), style=style)


class Name:
    """A name that loses its head where there is no room, its shape before too much of its place: `…ks.3.mlp · gelu`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield shorten_label(self.text, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = words(self.text).cell_len
        return Measurement(min(_NARROWEST, width), width)


def shorten_label(label: str, width: int) -> Text:
    """`place · op · shape` in at most `width` columns: without its shape, then its op, where little of the place were left."""
    parts = label.split(_JOINT)
    while len(parts) > 1 and words(_JOINT.join(parts)).cell_len > width:
        left = width - 1 - len(_JOINT) - words(_JOINT.join(parts[1:])).cell_len
        if left >= min(len(parts[0]), _LEAST_PLACE):
            break
        parts.pop()
    return shorten(_JOINT.join(parts), width)


def shorten(text: str, width: int) -> Text:
    """`text` in at most `width` columns, cut from the left."""
    whole = words(text)
    whole.no_wrap, whole.overflow = True, "crop"
    if whole.cell_len <= width:
        return whole
    start = 0
    while start < len(whole) and whole[start:].cell_len > width - 1:
        start += 1
    short = Text("…", no_wrap=True, overflow="crop")
    return short.append_text(whole[start:])


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


def biggest_table(held: Sequence[Held], total: int, most: int, width: int) -> Table:
    """The biggest tensors of a moment, those of alike layers as one; their times and lines where `width` has room."""
    times, lines = width >= _TIMES_FIT, width >= _LINES_FIT
    columns = [("size", "right"), *([("share", "right")] if times else []), ("kind", "left")]
    columns += [("born at", "right"), ("idle", "right")] if times else []
    columns += [("tensor", "name")] + ([("line", "left")] if lines else [])
    table = plain_table("Biggest tensors", columns)
    groups = gather(held, lambda row: row.label, lambda row: (row.category, row.size_bytes))
    groups.sort(key=lambda group: -sum(row.size_bytes for row in group[1]))
    for name, rows in groups[:most]:
        size = sum(row.size_bytes for row in rows)
        cells: list[Text | Name | str] = [format_bytes(size), *([share(size, total)] if times else [])]
        cells.append(Text(rows[0].category, style=COLORS.get(rows[0].category, "")))
        if times:
            cells += [_born(rows), _idle(rows)]
        cells.append(Name(name))
        table.add_row(*cells, *([words(rows[0].line)] if lines else []))
    left = [row for _, rows in groups[most:] for row in rows]
    if left:
        size = sum(row.size_bytes for row in left)
        table.add_row(
            format_bytes(size),
            *([share(size, total), "", "", ""] if times else [""]),
            Name(f"({len(left)} more)"),
        )
    return table


def _born(rows: Sequence[Held]) -> str:
    first, last = min(row.born_op for row in rows), max(row.born_op for row in rows)
    return "before" if first < 0 else f"op {first}" if first == last else f"op {first}-{last}"


def _idle(rows: Sequence[Held]) -> str:
    """How long they are not needed: the longest of them."""
    longest = max(row.idle_ms for row in rows)
    return f"{'≤ ' if len(rows) > 1 else ''}{format_ms(longest)}" if longest else "-"


def pairs_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A row name, then figures."""
    table = plain_table(title, [(columns[0], "left"), *((name, "right") for name in columns[1:])])
    for row in rows:
        table.add_row(*row)
    return table
