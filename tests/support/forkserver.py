"""The server of `tests.support.warm`: runs python command lines in forked children of one process that has imported torch already.

Reads one JSON object a line ({"words", "cwd", "env", "stdin", "stdout", "stderr"}: what follows `python`, and paths of files) and answers
with two lines: the child's process id, then its exit code, as `subprocess` gives it. A child is spared torch's import, nothing else.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from types import ModuleType

import memopt.cli.main
import memopt.estimators.fake.script.child

IMPORTED = (
    "torch._dynamo", "torch._inductor.async_compile", "torch._inductor.codegen.cpp", "torch._inductor.compile_fx", "torch._inductor.graph",
    "memopt.cli.apply", "memopt.cli.profile", "memopt.enforcers.session", "memopt.estimators.fake.gpu.cuda",
    "memopt.estimators.fake.recorder", "memopt.profiler.session",
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


def outcome(words: list[str]) -> int:
    """The exit code of `python *words`, run here."""
    try:
        if words[:2] == ["-m", "memopt"]:
            sys.path[0] = os.getcwd()
            sys.argv = ["memopt", *words[2:]]
            return memopt.cli.main.run(words[2:])
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
    gc.collect()
    gc.freeze()
    serve()
