"""memopt from Python: the same rooms as the commands, as functions and context managers. Nothing heavy is imported before it is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.estimators.estimate import Estimate
    from memopt.instrument.script.command import Command
    from memopt.outcome import Outcome
    from memopt.reports.loaded import Loaded, LoadedProfile


def load(path: str | Path) -> Loaded:
    """The profile, plan, outcome, estimate or torch memory snapshot at `path`. Raises `BadFile`, `UsageError`.

    What comes back has `.to_pandas()`, `.plot()` and `.report(path)`, shows itself in notebooks, and holds the data as `.data`.
    """
    from memopt.reports.loaded import loaded

    return loaded(Path(path))


class Profiling:
    """What `memopt.profile()` gives to its `with`: empty until the block has ended, then the profile."""

    def __init__(self) -> None:
        self.result: LoadedProfile | None = None

    def _repr_html_(self) -> str:
        return (
            self.result._repr_html_() if self.result is not None else "<p>memopt: nothing was recorded.</p>"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.result is None:
            raise AttributeError(f"there is no profile yet, so no {name!r}: the with-block must have ended")
        return getattr(self.result, name)


@contextmanager
def profile(
    path: str | Path | None = None, *, warmup: int = 2, steps: int = 1, device: str = "", force: bool = False
) -> Iterator[Profiling]:
    """Record one steady iteration of the training loop inside the block, and go on.

    The block must take at least `warmup + 1` steps. The profile is written to `path`, if one is given (never over a file, but with
    `force`), and is the value of the `with` once it has ended. A block that raises leaves a partial one. Raises `RunFailed` where
    the block trained nothing.
    """
    from memopt.cli.profile import nothing_seen
    from memopt.files import refuse_overwrite, swap_folder
    from memopt.profiler.recordings import Wanted
    from memopt.profiler.session import ProfileSession
    from memopt.reports.loaded import LoadedProfile

    target = None if path is None else Path(path).absolute()
    if target is not None:
        refuse_overwrite(target, force=force)
    wanted = Wanted(warmup=warmup, steps=steps, keep_running=True, swap_dir=swap_folder(None), device=device)
    session = ProfileSession(_this_command(), wanted, done=lambda trace: None)
    found = Profiling()

    def end() -> None:
        trace = session.finished()
        if trace is not None:
            if target is not None:
                trace.save(target)
            found.result = LoadedProfile(trace, target.name if target else "profile")

    session.install()
    try:
        yield found
    except BaseException as error:
        session.ended_by(error)
        end()
        raise
    end()
    if found.result is None:
        raise session.failure or nothing_seen(session, interrupted=False)


class Enforcing:
    """What `memopt.enforce()` gives to its `with`: the outcome, once the block has ended."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None


@contextmanager
def enforce(
    plan: str | Path, *, swap_dir: str | Path | None = None, measure: bool = False
) -> Iterator[Enforcing]:
    """Run the training steps inside the block under the plan in the file `plan`; outside, nothing is changed.

    Losses, gradients, parameters and buffers are bit for bit those of the plain run. `measure`: also measure the peak, which on a CPU
    slows a few iterations down. Raises `BadFile`, and `NotPossibleHere` for a plan that only advises.
    """
    from memopt.cli.shared.plan_here import prepare_run
    from memopt.enforcers.session import ApplySession, Options
    from memopt.files import swap_folder
    from memopt.plan import load_plan

    loaded = load_plan(Path(plan))
    folder = swap_folder(Path(swap_dir) if swap_dir is not None else None)
    said = prepare_run(loaded, os.environ)
    session = ApplySession(loaded, Options(swap_dir=folder, measure=measure))
    if said and "torch" in sys.modules:
        session.notes.append("the plan's allocator settings come too late: torch was imported before")
    found = Enforcing()
    session.install()
    try:
        yield found
    finally:
        found.outcome = session.finished()


def estimate(target: str | Path, *args: str, device: str = "", **options: Any) -> Estimate:
    """The peak memory of training `target` before it is run: a script with its arguments `args`, an ONNX model, or a profile.

    `device` is a name as `memopt estimate --device` takes it (`a100-80gb` unless given; `cpu`: this machine). `options` go to
    `estimate_script`, `estimate_onnx` or `estimate_trace`: `steps`, `timeout_s`; `batch_size`, `dims`, `dtype`, `optimizer`.
    Bytes; `error` says how far off each answer may be.
    """
    from memopt.estimators.estimate import DEFAULT_DEVICE, estimate_script

    path = Path(target)
    name = path.name.lower()
    if name.endswith(".py"):
        return estimate_script([str(target), *args], device=device or DEFAULT_DEVICE, **options)
    if args:
        raise UsageError(
            f"'{args[0]}' is not understood",
            why="only a script takes arguments",
            try_="memopt.estimate('train.py', ...)",
        )
    if name.endswith(".onnx"):
        from memopt.estimators.onnx.estimate import estimate_onnx

        return estimate_onnx(path, device=device or DEFAULT_DEVICE, **options)
    from memopt.estimators.elsewhere.from_profile import estimate_trace
    from memopt.trace import load_trace

    return estimate_trace(load_trace(path), device=device or None, **options)


def _this_command() -> Command:
    """The command that this process was started with; a session without a file (a notebook, `python -c`) is this module's."""
    from memopt.instrument.script.command import Command, find_source

    command = Command(tuple(sys.argv) if sys.argv and sys.argv[0] else (__file__,))
    try:
        find_source(command)
    except UsageError:
        return Command((__file__,))
    return command
