"""What a run is doing now, in a few lines for the foot of a terminal, as wide as that is."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from memopt.reports.tables import words
from memopt.units import format_bytes, format_ms

ROWS = 5
_EIGHTHS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Now:
    """What is known at one moment. Bytes, ms; `room_bytes` is 0 where it is not known."""

    script: str
    device: str = "cpu"
    what: str = "process"
    """Whose bytes: `process` (its resident set) or `tensors` (on the accelerator)."""
    used_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    room_bytes: int = 0
    steps: int = 0
    step_ms: float = 0.0
    seconds: float = 0.0
    history: deque[int] = field(default_factory=lambda: deque(maxlen=400))


def panel(now: Now, width: int, *, color: bool = True) -> list[str]:
    """`ROWS` lines of at most `width` columns, with the terminal's escapes where `color`."""
    file = io.StringIO()
    console = Console(file=file, width=max(20, width), force_terminal=color, color_system="standard" if color else None, highlight=False, markup=False, emoji=False, legacy_windows=False)  # fmt: skip
    for line in (
        _rule(now, width),
        _bar(now, width),
        _line(now),
        _spark(now, width, 0),
        _spark(now, width, 1),
    ):
        line.truncate(max(20, width), overflow="ellipsis")
        line.no_wrap = True
        console.print(line)
    return file.getvalue().split("\n")[:ROWS]


def _rule(now: Now, width: int) -> Text:
    head = words(f"── memopt live: {now.script} on {now.device} ")
    return Text.assemble(head, "─" * max(0, width - head.cell_len), style="dim")


def _bar(now: Now, width: int) -> Text:
    room = now.room_bytes or max(now.peak_bytes, 1)
    figures = (
        f" {format_bytes(now.used_bytes)} of {format_bytes(room)}"
        if now.room_bytes
        else f" {format_bytes(now.used_bytes)}"
    )
    cells = max(8, width - len(figures) - 1)
    used, peak = (min(cells, round(cells * size / room)) for size in (now.used_bytes, now.peak_bytes))
    share = now.used_bytes / room if now.room_bytes else 0.0
    tone = "red" if share > 0.9 else "yellow" if share > 0.75 else "green"
    return Text.assemble(
        ("█" * used, tone),
        ("▒" * max(0, peak - used), "dim"),
        ("·" * (cells - max(used, peak)), "dim"),
        (figures, "bold"),
    )


def _line(now: Now) -> Text:
    parts = [f"peak {format_bytes(now.peak_bytes)} ({now.what})"]
    if now.reserved_bytes:
        parts.append(f"reserved {format_bytes(now.reserved_bytes)}")
    if now.steps:
        parts.append(f"step {now.steps}" + (f", {format_ms(now.step_ms)} each" if now.step_ms else ""))
    parts.append(f"{int(now.seconds) // 60}:{int(now.seconds) % 60:02d}")
    return Text("  ".join(parts))


def _spark(now: Now, width: int, row: int) -> Text:
    """The upper (0) or lower (1) half of the curve of the last samples."""
    shown = sampled(now.history, max(20, width))
    top = max(shown, default=0)
    if not top:
        return Text()
    levels = [round(16 * size / top) for size in shown]
    cells = [max(0, min(8, level - 8)) if row == 0 else min(8, level) for level in levels]
    return Text("".join(_EIGHTHS[cell - 1] if cell else " " for cell in cells), style="cyan")


def sampled(history: Sequence[int], most: int) -> list[int]:
    """The last `most` samples."""
    return list(history)[-most:]


def plain_line(now: Now) -> str:
    """The same in one line, for a log."""
    return f"{format_bytes(now.used_bytes)} now, {_line(now).plain}".replace("  ", ", ")
