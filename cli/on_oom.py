"""`MEMOPT_ON_OOM=DIR`: a script under memopt that runs out of memory leaves a profile and a page there; the error stays as it is."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memopt.instrument.script.command import Command
    from memopt.trace import Trace

VARIABLE = "MEMOPT_ON_OOM"


def leaving_traces(
    command: Command,
    raised: Callable[[BaseException], object] = lambda error: None,
    recorded: Callable[[], Trace | None] = lambda: None,
) -> Callable[[BaseException], None]:
    """For `runner.run`: calls `raised` first; then, of an error that is one of memory, writes what `recorded` gives, else what is found."""

    def told(error: BaseException) -> None:
        folder = os.environ.get(VARIABLE)
        try:
            raised(error)
        finally:
            if folder:
                _leave(Path(folder), command, error, recorded)

    return told


def _leave(
    folder: Path, command: Command, error: BaseException, recorded: Callable[[], Trace | None]
) -> None:
    from memopt.cli.shared.console import say
    from memopt.profiler.ending import in_words, is_out_of_memory

    if not is_out_of_memory(error) or "torch" not in sys.modules:
        return
    rank = os.environ.get("RANK", "")
    stem = f"oom_rank{rank if rank.isdecimal() else '0'}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _leave_snapshot(folder / f"{stem}.pickle")
        trace = recorded()
        if trace is None or "out of memory" not in trace.partial:
            from memopt.profiler.out_of_memory import trace_of_now
            from memopt.profiler.trace_of import describe_script

            trace = trace_of_now(describe_script(command), in_words(error), _line(error, command))
        path = folder / f"{stem}.profile.json.gz"
        trace.save(path)
        say(f"{VARIABLE}: wrote {path}, and {_page(path)}")
    except Exception as failure:  # the script's own error must be the one that is seen
        say(f"{VARIABLE}: nothing more was written to {folder}: {type(failure).__name__}: {failure}"[:500])


def _leave_snapshot(path: Path) -> None:
    """torch's own snapshot of the allocator, where there is one to take."""
    import torch

    from memopt.instrument.torch_internals import dump_snapshot

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        dump_snapshot(str(path))


def _page(path: Path) -> Path:
    from memopt.reports.inputs import read_inputs
    from memopt.reports.page.html import page

    target = path.with_name(path.name.replace(".profile.json.gz", ".report.html"))
    target.write_text(page(read_inputs([path]), [path.name]), encoding="utf-8")
    return target


def _line(error: BaseException, command: Command) -> str:
    """The innermost line of the script itself on the way to the error."""
    name = Path(command.argv[0]).name
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).name == name]
    return f"{name}:{frames[-1].lineno}" if frames else ""
