"""A small picture of the bytes over one iteration: height is memory, colour and the lower edge tell the phase."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from memopt.trace import PHASES, Trace
from memopt.units import format_bytes

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ASCII = "     ####"
_COLORS = {"forward": "green", "backward": "yellow", "optimizer": "magenta", "other": "bright_black"}
_MARKS = {"forward": "f", "backward": "b", "optimizer": "o", "other": "."}


class Area:
    """Most bytes on the device per slice of the iteration's time, drawn `rows` lines high."""

    def __init__(self, trace: Trace, rows: int = 6) -> None:
        ops = trace.ops
        self._high = [live + extra for live, extra in zip(ops.live_bytes, ops.extra_bytes, strict=True)]
        self._phase = ops.phase
        self._time_us = ops.time_us
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        peak = max(self._high, default=0)
        if not peak:
            return
        labels = [format_bytes(peak * (self._rows - row) // self._rows) for row in range(self._rows)]
        edge = max(map(len, labels))
        width = max(8, min(options.max_width - edge - 3, 100, len(self._high)))
        slices = slices_of(self._high, self._phase, self._time_us, width)
        blocks = _ASCII if not console.encoding.startswith("utf") else _EIGHTHS
        for row, label in enumerate(labels):
            line = Text(f"{label:>{edge}} ┤" if blocks is _EIGHTHS else f"{label:>{edge}} |", no_wrap=True)
            for most, phase in slices:
                eighths = round(8 * self._rows * most / peak) - 8 * (self._rows - 1 - row)
                line.append(blocks[max(0, min(8, eighths))], style=_COLORS[phase])
            yield line
        yield _edge(slices, edge)


def slices_of(high: list[int], phase: list[int], time_us: list[float], width: int) -> list[tuple[int, str]]:
    """(most bytes, phase of the op that has them) for `width` slices of equal time; the peak survives any thinning."""
    count = len(high)
    if not any(time_us):
        time_us = [1.0] * count
    ends = list(accumulate(time_us))
    found = []
    begin = 0
    for column in range(width):
        end = count if column == width - 1 else bisect_right(ends, ends[-1] * (column + 1) / width)
        ops = range(begin, end) or range(min(end, count - 1), min(end, count - 1) + 1)
        op = max(ops, key=high.__getitem__)
        found.append((high[op], PHASES[phase[op]]))
        begin = max(begin, end)
    return found


def _edge(slices: list[tuple[int, str]], indent: int) -> Text:
    """The phases, named where there is room."""
    line = Text(" " * (indent + 2), no_wrap=True)
    start = 0
    for place in range(1, len(slices) + 1):
        phase = slices[start][1]
        if place < len(slices) and slices[place][1] == phase:
            continue
        width = place - start
        text = phase if width > len(phase) else _MARKS[phase]
        line.append(f"{text:{'-' if width > len(text) else ''}^{width}}"[:width], style=_COLORS[phase])
        start = place
    return line
