"""`memopt live`: run a script as python would, with a view of its memory at the foot of the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.on_oom import leaving_traces
from memopt.cli.shared.numbers import Real
from memopt.instrument.memory.outside import resident_bytes

if TYPE_CHECKING:
    from memopt.instrument.script.command import Command

_LOG_EVERY_S = 10.0
_LEAST_ROWS = 12


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--interval", "interval_s", type=Real(min=0.05, max=60), default=0.25, show_default=True, metavar="SECONDS", help="How often memory is looked at.")  # fmt: skip
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def live(script: str, args: tuple[str, ...], interval_s: float, as_module: bool) -> int:
    """Show how much memory SCRIPT takes while it runs.

    The script's output stays its own and scrolls above; nothing is recorded and nothing is changed. Without a
    terminal a line is written to stderr every ten seconds.
    """
    from memopt.cli.shared.as_typed import command_as_typed
    from memopt.instrument.script.command import find_source
    from memopt.instrument.script.runner import run_to_the_end

    command = command_as_typed((script, *args), as_module=as_module)
    find_source(command)
    view = _View(command, interval_s)
    view.start()
    return run_to_the_end(command, view.stop, raised=leaving_traces(command))


class _View:
    """Samples in a thread of its own and draws below the part of the terminal that scrolls."""

    def __init__(self, command: Command, interval_s: float) -> None:
        from memopt.cli.shared.console import is_terminal
        from memopt.reports.live import Now

        self._interval_s = interval_s
        self._now = Now(script=Path(command.argv[0]).name)
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memopt live", daemon=True)
        self._steps: deque[float] = deque(maxlen=20)
        self._stream = sys.stderr
        self._foot = _Foot(self._stream) if is_terminal(sys.stderr) else None
        self._logged = self._begun

    def start(self) -> None:
        from memopt.instrument.script.on_import import call_after_import

        call_after_import("torch", self._watch_steps)
        self._thread.start()

    def _watch_steps(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._now.steps += 1
            self._steps.append(time.monotonic())

        register_optimizer_step_post_hook(stepped)

    def _work(self) -> None:
        while not self._over.wait(self._interval_s):
            self._look()
            self._tell()

    def _look(self) -> None:
        now = self._now
        now.seconds = time.monotonic() - self._begun
        if not _look_at_accelerator(now):
            now.used_bytes = resident_bytes()
            now.room_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            now.peak_bytes = max(now.peak_bytes, now.used_bytes)
        now.history.append(now.used_bytes)
        times = list(self._steps)
        if len(times) > 1:
            now.step_ms = 1000 * (times[-1] - times[0]) / (len(times) - 1)

    def _tell(self) -> None:
        from memopt.reports.live import panel, plain_line

        if self._foot is not None:
            self._foot.draw(lambda width: panel(self._now, width, color=not os.environ.get("NO_COLOR")))
        elif time.monotonic() - self._logged >= _LOG_EVERY_S:
            self._logged = time.monotonic()
            print(f"memopt: {plain_line(self._now)}", file=self._stream, flush=True)

    def stop(self, how: int) -> None:
        """Give the terminal back as it was, and say what it came to."""
        from memopt.cli.shared.console import outlive_the_scripts_stderr, say
        from memopt.reports.live import plain_line

        self._over.set()
        self._thread.join(timeout=5)
        if self._foot is not None:
            self._foot.remove()
        self._look()
        outlive_the_scripts_stderr()
        say(plain_line(self._now))


def _look_at_accelerator(now: Any) -> bool:
    """What is on the accelerator, if the script uses one."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return False
    index = torch.cuda.current_device()
    now.device, now.what = f"cuda:{index}", "tensors"
    now.used_bytes = torch.cuda.memory_allocated(index)
    now.reserved_bytes = torch.cuda.memory_reserved(index)
    now.peak_bytes = max(now.peak_bytes, now.used_bytes, torch.cuda.max_memory_allocated(index))
    now.room_bytes = torch.cuda.get_device_properties(index).total_memory
    return True


class _Foot:
    """The last lines of a terminal: what is above them scrolls (DECSTBM), the script's cursor stays where it is."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._size: tuple[int, int] | None = None

    def draw(self, lines: Any) -> None:
        from memopt.reports.live import ROWS

        size = shutil.get_terminal_size()
        columns, rows = os.get_terminal_size(self._stream.fileno()) if self._stream.isatty() else size
        if rows < _LEAST_ROWS:
            self.remove()
            return
        text = ""
        if self._size != (columns, rows):
            text += self._made_room(rows, ROWS)
            self._size = (columns, rows)
        drawn = lines(columns)
        text += "\x1b7" + "".join(
            f"\x1b[{rows - ROWS + 1 + i};1H\x1b[2K{line}" for i, line in enumerate(drawn)
        )
        self._write(text + "\x1b8")

    def _made_room(self, rows: int, height: int) -> str:
        """Scroll up what stands where the foot will be, then let only the part above it scroll."""
        scroll = "" if self._size is not None else "\n" * height + f"\x1b[{height}A"
        return f"{scroll}\x1b7\x1b[1;{rows - height}r\x1b8"

    def remove(self) -> None:
        if self._size is None:
            return
        from memopt.reports.live import ROWS

        rows = self._size[1]
        clear = "".join(f"\x1b[{rows - i};1H\x1b[2K" for i in range(ROWS))
        self._size = None
        self._write(f"\x1b7\x1b[r{clear}\x1b8")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the script has closed it
            self._size = None
