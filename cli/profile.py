"""`memopt profile`: run a training script as python would, record one steady iteration, and write it down."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memopt.cli.on_oom import leaving_traces
from memopt.cli.requests import ProfileRequest
from memopt.cli.shared.device_here import require_device
from memopt.cli.shared.ranks import path_of_rank, rank_here
from memopt.cli.shared.swap_dir import require_folder
from memopt.errors import MemoptError, RunFailed, UsageError

if TYPE_CHECKING:
    from memopt.instrument.script.children import Children
    from memopt.instrument.script.command import Command
    from memopt.profiler.offload import OpenTier, Tier
    from memopt.profiler.session import ProfileSession
    from memopt.trace import Trace

_SOFTWARE = RunFailed.exit_code
_SILENT_S = 1.0
_WARMUP = 2
"""Iterations before the recorded one, where nobody says otherwise."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-o", "--output", metavar="FILE", default=None, help="Where to write the profile; %p pid, %r rank, %h host. [default: memopt-SCRIPT.profile.json.gz]")  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Overwrite the file if it exists.")
@click.option("--warmup", metavar="N", type=click.IntRange(min=0), default=None, help="Iterations before the recorded one.  [default: 2, and more where the third is a small one]")  # fmt: skip
@click.option("--steps", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="Iterations over which op times are medians.")  # fmt: skip
@click.option("--keep-running", is_flag=True, help="Let the script go on after the recording.")
@click.option("--swap-dir", metavar="DIR", type=click.Path(path_type=Path), help="The folder whose disk is measured, for plans that swap; give apply the same.  [default: the system's for temporary files]")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=None, help="Whose memory to record.  [default: where the parameters are]")  # fmt: skip
@click.option("--offload", is_flag=True, help="For a script that does not fit: move every saved tensor to the host or to --swap-dir while it is recorded.")  # fmt: skip
@click.option("--from-snapshot", type=click.Path(path_type=Path), default=None, metavar="FILE", help="Make the profile from PyTorch's memory snapshot instead: allocations without operators.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Say nothing unless something went wrong.")
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def profile(**options: Any) -> int:
    """Record one steady iteration of a training SCRIPT.

    SCRIPT runs unmodified, with all that follows it as its own arguments, and is stopped once its
    third iteration is recorded (or, where that is a small last batch, the fifth). Its output, its exit code and its signals stay its own.
    """
    request = ProfileRequest(**options)
    if request.from_snapshot is not None:
        if request.script is not None:
            raise UsageError(
                "--from-snapshot runs nothing", why=f"{request.script} was given too", try_="one of the two"
            )
        from memopt.cli.profile_snapshot import write_profile

        return write_profile(request.from_snapshot, request.output, force=request.force, quiet=request.quiet)
    if request.script is None:
        raise click.UsageError("Missing argument 'SCRIPT'.")
    from memopt.cli.shared.as_typed import command_as_typed

    command = command_as_typed((request.script, *request.args), as_module=request.as_module)
    path = _checked_path(request, command)
    return _record(request, command, path, require_folder(request.swap_dir))


def _checked_path(request: ProfileRequest, command: Command) -> Path:
    """Where the profile goes. Raises for a device that is not here, another's file, and a script that is not there."""
    from memopt.cli.shared.own_files import refuse_foreign
    from memopt.instrument.script.command import find_source
    from memopt.trace import Script

    if request.device is not None:
        require_device(
            request.device,
            f"nothing can be recorded on {request.device}",
            try_="memopt profile without --device",
        )
    path = profile_path(request.output, command)
    same = Script(argv=list(command.argv), cwd=os.getcwd(), as_module=command.as_module)
    refuse_foreign(path, "memopt.trace", script=same, force=request.force)
    find_source(command)
    return path


def _record(request: ProfileRequest, command: Command, path: Path, folder: Path) -> int:
    """Run the script and record it, in this process or in one that it starts; gives the exit code."""
    from memopt.instrument.script.children import Children
    from memopt.profiler.child import RecordsChild
    from memopt.profiler.recordings import Wanted
    from memopt.profiler.session import ProfileSession

    warmup = _WARMUP if request.warmup is None else request.warmup
    ending = _Ending(path, request.quiet, warmup)
    wanted = Wanted(
        warmup=warmup,
        chooses=int(request.warmup is None and request.steps == 1),
        steps=request.steps,
        keep_running=request.keep_running,
        swap_dir=folder,
        device=request.device or "",
        offload=tier_opener(folder) if request.offload else None,
    )
    begins: Callable[[int, int], None] = _nothing
    if not (request.quiet or rank_here()):
        begins = told = Progress()
        told.say(f"running {command.in_words}, to record iteration {warmup + 1}")
    session = ProfileSession(command, wanted, done=ending.write, begins=begins)
    in_child = RecordsChild(command, replace(wanted, offload=None), path, ending.claim)
    children = Children(in_child, wanted=lambda: not session.iterations_seen)
    return ending.run(session, command, children, keep_running=request.keep_running)


def _nothing(iteration: int, recorded: int) -> None:
    """Nobody wants to hear which iteration begins."""


def tier_opener(folder: Path) -> OpenTier:
    """Where saved tensors go while a script that does not fit is recorded: the host for a GPU, else the disk."""

    def open_tier() -> Tier:
        from memopt.enforcers.tiers.per_device import offload_tier

        return offload_tier(folder)

    return open_tier


def profile_path(output: str | None, command: Command) -> Path:
    """The file that the profile of `command` goes to, `-o` given as `output`. Raises `UsageError` where it cannot be one."""
    rank = os.environ.get("RANK", "")
    if output is None:
        stem = command.stem or "script"
        return Path(f"memopt-{stem}{f'-rank{rank}' if rank.isdecimal() else ''}.profile.json.gz").absolute()
    if output in ("-", ""):
        raise UsageError(
            "a profile cannot be written to stdout",
            why="stdout belongs to the script that is run",
            try_="-o FILE",
        )
    return path_of_rank(output, ".profile.json.gz")


class Progress:
    """Says which iteration begins, at most once a second: a quick script's lines would be nothing but noise."""

    def __init__(self) -> None:
        self._said_s = 0.0

    def say(self, text: str) -> None:
        from memopt.cli.shared.console import say

        say(text)
        self._said_s = time.monotonic()

    def __call__(self, iteration: int, recorded: int) -> None:
        """Iteration `iteration` begins; `recorded` is the one that is recorded."""
        if time.monotonic() < self._said_s + _SILENT_S:
            return
        of = f"iteration {iteration} of {recorded}"
        if iteration > recorded:
            self.say(f"timing iteration {iteration}, without recording")
        else:
            self.say(f"recording {of}" if iteration == recorded else f"{of}, before the recorded one")


class _Ending:
    """Writes the profile when there is one, and says at the end what became of it."""

    def __init__(self, path: Path, quiet: bool, warmup: int) -> None:
        from memopt.instrument.script.children import unused_name

        self._warmup = warmup
        self._raised = ""
        self._path = path
        self._quiet = quiet
        self._trace: Trace | None = None
        self._failure: MemoptError | None = None
        self._failed = False
        self.claim = unused_name().with_suffix(".recorded")
        """There once a process that the script has started has left the profile."""

    def write(self, trace: Trace) -> None:
        """Write `trace` at once: the script may go on for hours, or end without asking."""
        self._trace = trace
        try:
            trace.save(self._path)
        except MemoptError as error:
            self._failure = error

    def run(
        self, session: ProfileSession, command: Command, children: Children, *, keep_running: bool
    ) -> int:
        """Run the script to its end and return the exit code; dies of the signal that the script died of."""
        from memopt.instrument.script.runner import run_to_the_end

        raised = leaving_traces(command, lambda error: self._ended_by(session, error), lambda: session.trace)
        session.install()
        children.install()
        code = run_to_the_end(command, lambda how: self._end(session, how), raised=raised)
        return _SOFTWARE if self._failed and not code and not keep_running else code

    def _ended_by(self, session: ProfileSession, error: BaseException) -> None:
        from memopt.profiler.ending import in_words

        self._raised = in_words(error)
        session.ended_by(error)

    def _end(self, session: ProfileSession, how: int) -> None:
        """Say what was written, or why nothing was."""
        from memopt.cli.shared.console import outlive_the_scripts_stderr, say

        if how > 0 and not self._raised:
            self._raised = f"the script ended with exit code {how}"
        outlive_the_scripts_stderr()
        session.finished("the script was stopped by SIGTERM" if how == -signal.SIGTERM else "")
        if self._trace is None and session.failure is None and self.claim.exists():
            from memopt.trace import load_trace

            self._trace = load_trace(self._path)
        self.claim.unlink(missing_ok=True)
        failure = (
            self._failure
            or session.failure
            or (
                None
                if self._trace
                else nothing_seen(session, interrupted=how == -signal.SIGINT, raised=self._raised)
            )
        )
        self._failed = failure is not None
        if failure is not None:
            say(str(failure))
        elif not self._quiet and self._trace is not None:
            for line in what_was_written(self._trace, self._path, self._warmup):
                say(line)


def nothing_seen(session: ProfileSession, *, interrupted: bool, raised: str = "") -> RunFailed:
    """Why there is no profile at all; `raised`: how the script itself failed."""
    from memopt.instrument.script.children import PUT_BEFORE, not_followed

    if raised and not interrupted:
        trained = "a whole step of training was seen" if session.iterations_seen else "it trained"
        return RunFailed(
            f"no profile was written: {raised}, before {trained}",
            why="the error is the script's own: it was run as python runs it",
            try_="the same again once the script runs under python",
        )
    if interrupted:
        return RunFailed(
            "no profile was written: the script was interrupted",
            why="it had run nothing yet that could be shown",
            try_="the same again, for at least three steps",
        )
    try_ = "the script that calls backward(), with arguments that make it train for at least three steps"
    if elsewhere := not_followed():
        why, try_ = elsewhere, PUT_BEFORE
    elif not session.torch_seen:
        why = "it never imported torch in this process"
    elif session.iterations_seen:
        why = "its iterations ran no op on the device that was watched"
    else:
        why = (
            "it made no optimizer step and no backward call in this process "
            "(what trains in another process is not seen)"
        )
    return RunFailed(
        "no profile was written: the script trained nothing that memopt could see",
        why=why,
        try_=try_,
    )


def what_was_written(trace: Trace, path: Path, warmup: int = 0) -> list[str]:
    """The last lines: the file, what it holds, and the command to type next. `warmup`: how many iterations it waited for."""
    from memopt.units import format_bytes

    try:
        name = str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        name = str(path)
    from memopt.profiler.ending import TOO_FEW_ITERATIONS

    lines = [f"wrote {name} (peak {format_bytes(trace.peak_bytes)}, {trace.op_count} ops)"]
    if trace.partial:
        lines.append(f"it is partial: {trace.partial}")
        if trace.partial == TOO_FEW_ITERATIONS and warmup:
            words = shlex.join([*(["-m"] if trace.script.as_module else []), *trace.script.argv])
            lines.append(f"next: memopt profile --warmup 0 {words}")
        else:
            lines.append(f"next: memopt show {shlex.quote(name)}")
        if "out of memory" in trace.partial:
            lines.append(
                "      to plan for it all the same: memopt profile --offload SCRIPT, or a smaller batch"
            )
        return lines
    if not trace.device.disk_out_bytes_per_s:
        lines.append("its swap folder could not be written: no plan will swap to disk (--swap-dir DIR)")
    from memopt.advisors.first_budget import first_budget
    from memopt.instrument.memory.outside import before_training

    lines += [note for note in (*early(trace), before_training(trace, trace.peak_bytes)) if note]
    return [*lines, f"next: memopt advise {shlex.quote(name)} --budget {first_budget(trace)}"]


def early(trace: Trace) -> list[str]:
    """What the profile says of itself where it is of another iteration than was asked for."""
    from memopt.profiler.ending import MADE_ONLY

    return [note for note in trace.notes if note.startswith(MADE_ONLY)]
