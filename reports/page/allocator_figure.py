"""The allocator's memory as a map: area is bytes, row below row, each segment where the one before it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from memopt.reports.figures import COLORS, Figure, plain_layout
from memopt.reports.page.allocator_view import FREE, ROUNDING, AllocatorView, Piece, Segment
from memopt.reports.page.sections import Cell, size, table
from memopt.reports.text import shown
from memopt.units import format_bytes

_ROWS = 16
_MOST_PIECES = 5000
_GAPS = {ROUNDING: "#8b0000", FREE: "rgba(128,128,128,.16)"}


def drawn(view: AllocatorView) -> Figure:
    """Bars by kind; what is free is pale, what rounding takes is red. The smallest pieces of a segment are drawn as one where there are too many."""
    import plotly.graph_objects as go

    whole = max(1, view.total_bytes())
    row_bytes = -(-whole // _ROWS)
    bars: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
    least = _least(view, whole)
    at, edges = 0, []
    for number, segment in enumerate(view.segments):
        edges.append(at)
        for piece in _merged(segment, least):
            words = _words(piece, number, segment)
            for row, start, length in _cut(at, piece.size_bytes, row_bytes):
                bars[piece.kind].append((row, start, length, words))
            at += piece.size_bytes
    figure = go.Figure(layout=plain_layout(height=340))
    figure.update_layout(margin={"b": 10, "t": 10})
    for kind in [*COLORS, ROUNDING, FREE]:
        rows = bars.get(kind, [])
        if rows:
            figure.add_bar(
                orientation="h", name=kind, width=0.86,
                y=[row for row, *_ in rows], base=[start for _, start, *_ in rows], x=[length for _, _, length, _ in rows],
                marker={"color": _GAPS.get(kind) or COLORS[kind], "line": {"width": 0}},
                customdata=[words for *_, words in rows], hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
    _mark(figure, edges, row_bytes)
    figure.update_layout(barmode="overlay", hovermode="closest", bargap=0, dragmode=False)
    figure.update_xaxes(visible=False, range=[0, row_bytes], fixedrange=True)
    ticks = list(range(0, _ROWS + 1, 4))
    figure.update_yaxes(
        autorange=False, range=[_ROWS - 0.5, -0.5], tickvals=[tick - 0.5 for tick in ticks],
        ticktext=[format_bytes(min(whole, tick * row_bytes)) for tick in ticks], showgrid=False,
    )  # fmt: skip
    return figure


def _mark(figure: Figure, edges: list[int], row_bytes: int) -> None:
    """A short upright line where a segment begins."""
    x: list[float | None] = []
    y: list[float | None] = []
    for edge in edges:
        row, start = divmod(edge, row_bytes)
        x += [start, start, None]
        y += [row - 0.47, row + 0.47, None]
    figure.add_scatter(
        x=x, y=y, mode="lines", name="segment", line={"width": 1.2, "color": "#16191d"}, hoverinfo="skip"
    )


def _least(view: AllocatorView, whole: int) -> int:
    """Pieces below so many bytes are drawn together with their neighbours: at most about `_MOST_PIECES` are left."""
    sizes = sorted((piece.size_bytes for piece in view.pieces()), reverse=True)
    return max(whole // 20_000, sizes[_MOST_PIECES] if len(sizes) > _MOST_PIECES else 0)


def _merged(segment: Segment, least: int) -> Iterator[Piece]:
    """The pieces of `segment`; neighbours of one kind that are too small to be seen as one piece."""
    found: list[Piece] = []
    for piece in segment.pieces:
        before = found[-1] if found else None
        if (
            before
            and piece.size_bytes < least
            and before.size_bytes < least * 4
            and ROUNDING not in (piece.kind, before.kind)
        ):
            larger = max(before, piece, key=lambda each: each.size_bytes)
            found[-1] = Piece(before.size_bytes + piece.size_bytes, larger.kind, "several small ones")
        else:
            found.append(piece)
    return iter(found)


def _cut(at: int, length: int, row_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(row, start in it, bytes) of what begins at `at`, row by row."""
    while length > 0:
        row, start = divmod(at, row_bytes)
        part = min(length, row_bytes - start)
        yield row, start, part
        at, length = at + part, length - part


def _words(piece: Piece, number: int, segment: Segment) -> str:
    name = {ROUNDING: "lost to rounding", FREE: "free, and kept by the allocator"}.get(piece.kind, piece.kind)
    label = shown(piece.label, 90).replace("&", "&amp;").replace("<", "&lt;")
    what = f"<b>{label}</b><br>" if label else ""
    pool = "small" if segment.small else "large"
    return f"{what}{format_bytes(piece.size_bytes)} · {name}<br>segment {number + 1}, {format_bytes(segment.size_bytes)}, {pool} pool"


def by_pool(view: AllocatorView) -> str:
    """A table: of each pool how much is reserved, how much of it tensors have, and what the rest is."""
    rows: list[list[Cell]] = []
    for name, small in (("Large (over 1 MiB)", False), ("Small", True)):
        segments = tuple(each for each in view.segments if each.small is small)
        if segments:
            rows.append(_row(name, AllocatorView(view.when, view.modelled, segments)))
    if len(rows) > 1:
        rows.append(_row("Both", view))
    heads = ("Pool", "Segments", "Reserved", "Tensors", "Rounding", "Free", "Largest free", "Not in tensors")
    return table(heads, rows, "What the allocator holds, by pool")


def _row(name: str, view: AllocatorView) -> list[Cell]:
    lost = 100 * view.fragmentation
    numbers = (
        view.total_bytes(),
        view.total_bytes(*COLORS),
        view.total_bytes(ROUNDING),
        view.total_bytes(FREE),
        view.largest_free_bytes,
    )
    return [
        Cell(name),
        Cell(f"{len(view.segments):,}", float(len(view.segments))),
        *(size(number) for number in numbers),
        Cell(f"{lost:.1f} %", lost),
    ]


def told(view: AllocatorView) -> str:
    """What the map means, in words."""
    reserved, free = view.total_bytes(), view.total_bytes(FREE)
    words = (
        f"The allocator has {format_bytes(reserved)} from the driver (reserved, which nvidia-smi counts) {view.when}, "
        f"in {len(view.segments):,} segments. {format_bytes(free)} of it is free, in pieces of at most {format_bytes(view.largest_free_bytes)}: "
        f"a larger request needs new memory."
    )
    if free > max(0.1 * reserved, 32 << 20):
        words += " Much is free in pieces: PYTORCH_ALLOC_CONF=expandable_segments:True is worth trying."
    if view.modelled:
        words += " Where the tensors lie is memopt's model of PyTorch's allocator, not a recording."
    return words


def key() -> str:
    """What the colours mean that no other picture has, as HTML."""
    dots: dict[str, Any] = {"lost to rounding": _GAPS[ROUNDING], "free": "rgba(128,128,128,.35)"}
    rows = "".join(f'<li><i class="dot" style="--c:{color}"></i>{name}</li>' for name, color in dots.items())
    return f'<ul class="key">{rows}<li>An upright line begins a segment.</li></ul>'
