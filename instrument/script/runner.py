"""Run somebody's script as `python` would, in this process.

The rules are those of coverage.py's `execfile.py`: a fresh `__main__` that stays in `sys.modules` (threads, atexit hooks
and pickling look classes up there later), argv and `sys.path[0]` as the interpreter sets them, tracebacks without our frames,
the script's own exit code, and death by the signal that killed it. Imports no torch: the script decides when that happens.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import importlib
import importlib.machinery
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from memopt.instrument.script.command import Command, find_source, module_spec
from memopt.instrument.script.on_import import call_after_import
from memopt.instrument.script.signals import before_terminating


class StopScript(SystemExit):
    """Ends the script when what was asked for is recorded; clean: `finally` and atexit run, the exit code is 0."""


_stopped: threading.Thread | None = None
"""The thread in which `stop_script` was called, where that was not the main one."""
_interrupts: int | None = None
"""The signal that ends the main thread when another one has called `stop_script`; None where the system has none to spare."""
_ends_pytest = False
"""The script may have started pytest: `stop_script` ends that. Where pytest runs memopt, it does not."""
_UNWINDING_S = 2.0
"""A thread that is still in torch's C++ code when the interpreter ends takes the process down with it."""


def stop_script() -> NoReturn:
    """End the script, from whichever of its threads; the main one is interrupted wherever it waits, and `run` gives 0."""
    main = threading.main_thread()
    if threading.current_thread() is not main:
        global _stopped
        _stopped = threading.current_thread()
        if main.ident is not None and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main.ident, _interrupts or signal.SIGINT)
        else:
            _thread.interrupt_main()
        raise SystemExit(0)  # of this very type: `threading` shows the traceback of any other
    if _ends_pytest and (pytest := sys.modules.get("pytest")) is not None:
        pytest.exit(
            "memopt has what it was asked to record", returncode=0
        )  # a mere exit is a test's failure there
    raise StopScript(0)


def _be_interruptible() -> None:
    """Give `stop_script` a signal of its own: Ctrl-C may be ignored (`nohup`, a shell's `&`) or be handled by the script."""
    global _interrupts
    if (
        _interrupts
        or not hasattr(signal, "SIGRTMAX")
        or threading.current_thread() is not threading.main_thread()
    ):
        return
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupted)
            _interrupts = number
            return


def _interrupted(number: int, frame: types.FrameType | None) -> NoReturn:
    raise StopScript(0)


def run(command: Command, *, raised: Callable[[BaseException], object] = lambda error: None) -> int:
    """Run `command` to its end and return its exit code; a traceback shows the user's frames only.

    `raised` is told of an exception that ends the script while the script's frames, and what they hold, still live.
    `KeyboardInterrupt` is re-raised after its traceback was shown, so that the caller can die of the signal.
    What the script still does once it was stopped is not told: the code is 0 then.
    """
    global _ends_pytest
    source = find_source(command)
    _ends_pytest = "pytest" not in sys.modules
    _be_interruptible()
    try:
        code = _run_body(command, source, raised)
        _wait_for_threads()
    except BaseException:
        if _stopped is None:
            raise
    if _stopped is not None:
        _stopped.join(_UNWINDING_S)
        return 0
    return code


def run_to_the_end(
    command: Command,
    ended: Callable[[int], object],
    *,
    raised: Callable[[BaseException], object] = lambda error: None,
) -> int:
    """As `run`, for a process that has more to say: `ended` is called once, in this process alone, before that ends.

    It is given the exit code, or, as in `subprocess`, the negative number of the signal that this process then dies of: SIGINT, and,
    once torch is imported and where the script has no handler of its own, SIGTERM. A child that the script has forked, and that comes
    back here, ends as it would under python.
    """
    pid, told = os.getpid(), False

    def end(how: int) -> None:
        nonlocal told
        if not told and os.getpid() == pid:
            told = True
            ended(how)

    call_after_import("torch", lambda: before_terminating(lambda: end(-signal.SIGTERM)))
    try:
        code = run(command, raised=raised)
    except KeyboardInterrupt:
        end(-signal.SIGINT)
        die_of(signal.SIGINT)
    if os.getpid() != pid:
        leave_child(code)
    end(code)
    return code


def _run_body(command: Command, source: Path, raised: Callable[[BaseException], object]) -> int:
    try:
        main = prepare_main(command, source)
        code = compile(source.read_bytes(), str(main.__file__), "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except BaseException as error:
        if _stopped is not None:
            return 0
        if isinstance(error, SystemExit):
            return exit_code_of(error)
        with contextlib.suppress(Exception):
            raised(error)
        _show(error)
        if isinstance(error, KeyboardInterrupt):
            raise
        return 1
    return 0


def _wait_for_threads() -> None:
    """Until the threads that the script has left behind are over, which may train: the interpreter would wait for them at its end.

    Those of a pool that is still open end only there.
    """
    pools = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", {})
    here = threading.current_thread()
    while waited_for := [
        t for t in threading.enumerate() if t is not here and not t.daemon and t not in pools
    ]:
        waited_for[0].join()


def prepare_main(command: Command, source: Path) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if sys.version_info < (3, 14):
        main.__annotations__ = {}  # the interpreter's own `__main__` has it from the start
    main.__file__ = os.path.join(os.getcwd(), source)
    if command.as_module:
        sys.argv = ["-m", *command.argv[1:]]
        sys.path[0] = os.getcwd()
        spec = module_spec(command.argv[0])
        if spec.parent:
            importlib.import_module(spec.parent)
        main.__spec__, main.__package__ = spec, spec.parent
        main.__loader__ = spec.loader
        main.__dict__["__cached__"] = spec.cached
    else:
        main.__spec__ = None
        main.__package__ = None
        main.__dict__["__cached__"] = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        folder = (
            command.argv[0] if Path(command.argv[0]).is_dir() else os.path.dirname(os.path.realpath(source))
        )
        if not sys.flags.safe_path or sys.path[0] != folder:
            sys.path[0] = folder
    first = str(source) if command.as_module else command.argv[0]
    sys.argv = [first, *command.argv[1:]]
    sys.modules["__main__"] = main
    return main


def exit_code_of(stop: SystemExit) -> int:
    """The process exit code that python gives this `SystemExit`; a message goes to stderr, as python does."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Show the traceback of `error` through `sys.excepthook`, without the frames of memopt."""
    error.__traceback__ = without_ours(error.__traceback__)
    seen: set[int] = set()
    chained = error.__cause__ or error.__context__
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        chained.__traceback__ = without_ours(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as broken:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(broken), broken, broken.__traceback__)


_ROOMS = ("memopt", "instrument", "profiler", "enforcers", "estimators", "advisors", "reports", "cli")


def _is_ours(filename: str, here: str) -> bool:
    rest = filename[len(here) + 1 :] if filename.startswith(here + os.sep) else ""
    return rest.partition(os.sep)[0] in _ROOMS and rest.endswith(".py")


def without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    """`trace` without the frames of memopt."""
    here, kept = str(Path(__file__).resolve().parents[2]), []
    while trace is not None:
        if not _is_ours(trace.tb_frame.f_code.co_filename, here):
            kept.append(trace)
        trace = trace.tb_next
    rebuilt: types.TracebackType | None = None
    for entry in reversed(kept):
        rebuilt = types.TracebackType(rebuilt, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rebuilt


def die_of(number: int) -> NoReturn:
    """End this process by signal `number`, as a shell expects; the script's threads and atexit hooks end first, as in python."""
    _last_rites()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


def leave_child(code: int) -> NoReturn:
    """End a forked child with `code` once its script is over: threads, atexit hooks and output first, as in python.

    torch's profiler leaves threads behind that exist in no child; the destructors of a usual exit wait for them, or crash.
    """
    _last_rites()
    os._exit(code)


def _last_rites() -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (
        sys.stdout,
        sys.stderr,
        sys.__stdout__,
        sys.__stderr__,
    ):  # a script may have put others in the place of the first two
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
