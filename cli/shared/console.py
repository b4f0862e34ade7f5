"""The one place that makes terminal output: a console for results (stdout) and one for everything else (stderr).

Colour: `--color`, then NO_COLOR and FORCE_COLOR, then whether the stream is a terminal (TERM=dumb is none).
Lines are as wide as the terminal, or as COLUMNS says; away from both, tables have 200 columns, and what is said is not wrapped.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, Any

import click

from memopt.cli.shared.ranks import rank_here

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_AWAY_FROM_A_TERMINAL = 200
_LEAST_WIDTH = 40
_COMMAND = re.compile(r"(memopt: (rank \d+: )?|\s*)(next: |try: )memopt ")
"""A line that is there to be typed."""


def out() -> Console:
    """Console on stdout: the asked-for result and nothing else."""
    _survive_narrow_encodings(sys.stdout)
    return _console(sys.stdout)


def err() -> Console:
    """Console on stderr: status, progress, warnings, hints."""
    return _console(sys.stderr)


def say(text: str) -> None:
    """Write `memopt: text` to stderr, without colour, wrapped at words where the width is known; under torchrun with the rank."""
    rank = rank_here()
    who = "memopt: " if rank is None else f"memopt: rank {rank}: "
    with _above_bars():
        print(wrapped(f"{who}{text}", width_of(sys.stderr)), file=sys.stderr, flush=True)


def _above_bars() -> AbstractContextManager[Any]:
    """Progress bars of tqdm's that the script shows are cleared in here, and shown again afterwards: what is said would go on in their line."""
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(bars, "_instances", None) or not hasattr(bars, "external_write_mode"):
        return nullcontext()
    aside: AbstractContextManager[Any] = bars.external_write_mode(file=sys.stderr)
    return aside


def wrapped(text: str, width: int | None) -> str:
    """`text` in lines of at most `width` columns, what follows a line's first indented; a command stays in one line, to be pasted."""
    if width is None:
        return text
    return "\n".join(part for line in text.splitlines() for part in _wrap(line, max(width, _LEAST_WIDTH)))


def wrapped_beside(heading: str, text: str, width: int | None) -> str:
    """`text` after `heading`, its later lines below its first, at most `width` columns wide."""
    import textwrap

    if width is None or len(heading) + len(text) <= width:
        return heading + text
    return textwrap.fill(
        text,
        max(width, len(heading) + _LEAST_WIDTH),
        initial_indent=heading,
        subsequent_indent=" " * len(heading),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrap(line: str, width: int) -> list[str]:
    import textwrap

    if len(line) <= width or _COMMAND.match(line):
        return [line]
    inner = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False
    ) or [line]


def width_of(stream: IO[str] | None) -> int | None:
    """How many columns `stream` has: what COLUMNS says, or the terminal's; None where neither tells."""
    if _columns():
        return _columns()
    return shutil.get_terminal_size().columns if is_terminal(stream) else None


def outlive_the_scripts_stderr() -> None:
    """The script may have closed it: what is still to be said then goes nowhere, and changes no exit code."""
    if getattr(sys.stderr, "closed", False):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def progress(
    what: str, total: float | None = None, *, short: bool = False, unit: str = ""
) -> Iterator[Callable[[float], None]]:
    """A bar on stderr while the block runs; the block calls the given function with how much more is done.

    Away from a terminal: the one line `memopt: what`, or nothing where it is `short`; where things are counted, also
    `memopt: point 4 of 12` as the fourth begins, at most once a second.
    """
    if not is_terminal(sys.stderr):
        if not short:
            say(what)
        yield _counting(unit, total) if total is not None and unit else lambda amount: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("memopt: {task.description}"),
        BarColumn(),
        *([TextColumn(unit)] if unit else []),
        TaskProgressColumn() if total is None else MofNCompleteColumn(separator=" of "),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def _counting(unit: str, total: float) -> Callable[[float], None]:
    done, said = 0.0, time.monotonic()

    def step(amount: float) -> None:
        nonlocal done, said
        done += amount
        if done < total and time.monotonic() >= said + 1.0:
            say(f"{unit} {done + 1:.0f} of {total:.0f}")
            said = time.monotonic()

    return step


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a person watches `stream` on a terminal that can redraw a line."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _console(stream: IO[str]) -> Console:
    from rich.console import Console

    settings: dict[str, Any] = {}
    choice = color_choice()
    if choice == "auto" and os.environ.get("NO_COLOR"):
        choice = "never"  # rich alone would keep bold
    if choice == "never":
        settings = {"no_color": True, "color_system": None}
    elif choice == "always":
        settings = {"no_color": False, "force_terminal": True, "color_system": "standard"}
    if not is_terminal(stream):
        settings["width"] = width_of(stream) or WIDTH_AWAY_FROM_A_TERMINAL
    return Console(file=stream, highlight=False, markup=False, emoji=False, **settings)


def color_choice() -> str:
    """`auto`, `always` or `never`, as given to `memopt --color` (or MEMOPT_COLOR)."""
    context = click.get_current_context(silent=True)
    return str(context.find_root().params.get("color") or "auto") if context else "auto"


def _columns() -> int:
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() else 0


def _survive_narrow_encodings(stream: IO[str]) -> None:
    """Print `?` for what the terminal's encoding lacks, rather than die of UnicodeEncodeError."""
    reconfigure = getattr(stream, "reconfigure", None)
    # surrogateescape is what python opens stdout with in the C locale: it is as strict with what is no byte
    if reconfigure is not None and getattr(stream, "errors", "") in ("strict", "surrogateescape"):
        reconfigure(errors="replace")
