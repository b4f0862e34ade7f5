"""The server of `tests.support.warm`: runs python command lines in forked children of one process that has imported torch already.

Reads one JSON object a line ({"words", "cwd", "env", "stdin", "stdout", "stderr"}: what follows `python`, and paths of files) and answers
with two lines: the child's process id, then its exit code, as `subprocess` gives it. A child is spared torch's import, nothing else.
"""

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

import memopt.cli.main
import memopt.estimators.fake.script.child
from tests.support.profiled import measured_once

IMPORTED = (
    "torch._dynamo", "torch._inductor.async_compile", "torch._inductor.codegen.cpp", "torch._inductor.compile_fx", "torch._inductor.graph",
    "memopt.cli.apply", "memopt.cli.profile", "memopt.enforcers.session", "memopt.estimators.fake.gpu.cuda",
    "memopt.enforcers.verify.compare", "memopt.estimators.fake.recorder", "memopt.profiler.timing.bandwidth", "memopt.profiler.session",
)  # fmt: skip
"""What children find there: torch, what torch itself imports in most of them, and what of memopt imports torch."""


def child(request: dict) -> None:
    """Become the process of `request`; ends it."""
    os.setpgid(0, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    opened = [
        os.open(request["stdin"], os.O_RDONLY),
        os.open(request["stdout"], os.O_WRONLY | os.O_APPEND),
        os.open(request["stderr"], os.O_WRONLY | os.O_APPEND),
    ]
    for number, file in enumerate(opened):
        os.dup2(file, number)
        os.close(file)
    from memopt.instrument.script.runner import leave_child

    leave_child(outcome(request["words"]))


def run(
    command: list[str], *, stdout: int, check: bool, cwd: Path | None, env: dict
) -> subprocess.CompletedProcess:
    """As `subprocess.run`, which it stands for in `memopt apply --verify`: the runs that are compared are spared torch's import, too."""
    assert (command[0], stdout, check) == (sys.executable, subprocess.DEVNULL, False)
    streams = {"stdin": os.devnull, "stdout": os.devnull, "stderr": "/dev/fd/2"}
    return subprocess.CompletedProcess(
        command, forked({"words": command[1:], "cwd": cwd or ".", "env": dict(env)} | streams)
    )


def forked(request: dict) -> int:
    """The exit code of `request`, run in a child of this process."""
    pid = os.fork()
    if pid == 0:
        weakref.finalize._registry.clear()  # the temporary folders of this process are not the child's to remove
        child(request)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(words: list[str]) -> int:
    """The exit code of `python *words`, run here."""
    try:
        if words[:2] == ["-m", "memopt"]:
            sys.path[0] = os.getcwd()
            sys.argv = ["memopt", *words[2:]]
            return memopt.cli.main.run(words[2:])
        if words[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            return 0
        if words[0] == "-c":
            sys.path[0] = ""
            name, source = "<string>", words[1].encode()
            words = ["-c", *words[2:]]
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
            with open(words[0], "rb") as file:
                name, source = os.path.abspath(words[0]), file.read()
        sys.argv = list(words)
        main = ModuleType("__main__")
        if name != "<string>":
            main.__file__ = name
        sys.modules["__main__"] = main
        exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        return 1
    return 0


def serve() -> None:
    """Answer until nobody asks any more."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # not this folder, as in the processes that it stands for
    for name in IMPORTED:
        importlib.import_module(name)
    memopt.enforcers.verify.compare.subprocess = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
    bandwidth = memopt.profiler.timing.bandwidth
    bandwidth.measure_device = measured_once(bandwidth.measure_device)
    bandwidth.measure_device("cpu", Path(tempfile.gettempdir()))
    gc.collect()
    gc.freeze()
    serve()
