"""The subprocess that runs a script on fake tensors: `python -m memopt.estimators.fake.script.child request.json result.json`.

It exists so that nothing that the script or torch's fake mode does can hurt the process that asked.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memopt.estimators.fake.script.request import Request, Result

if TYPE_CHECKING:
    from memopt.estimators.fake.recorder import FakeRecorder
    from memopt.estimators.fake.script.aside import Aside


def main() -> None:
    """Read the request, run the script, write the result."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    result_path = Path(sys.argv[2])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(result_path.parent / "inductor")
    result = _run(request)
    result_path.write_bytes(msgspec.json.encode(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


_OBJECTS = 7_000
"""New objects between two collections of garbage. A pretended op makes ten times those of a real one: with Python's own 700, garbage
would be collected ten times as often as in the real run, and a long loop of ops would spend a quarter of its time on it."""


def _run(request: Request) -> Result:
    from memopt.estimators.fake.torch_internals import require_estimates

    require_estimates()
    from memopt.estimators.fake.ledger import Enough
    from memopt.estimators.fake.script.aside import Aside
    from memopt.estimators.fake.script.ending import Ending
    from memopt.estimators.recording import classify

    recorder = _installed(request)
    aside = Aside(recorder)
    aside.install()
    problem, line, trace = "", "", ""
    with recorder:
        watch = recorder.watch
        assert watch is not None
        ending = Ending(recorder, watch, request.steps, further=request.further)
        ended = False
        gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
        try:
            _execute(request, aside)
            ended = True
        except Enough:
            pass
        except SystemExit as stop:
            ended = True
            if stop.code not in (None, 0) and not watch.backwards:
                problem = f"the script exited with {stop.code}"
        except BaseException as error:
            problem, line, trace = _told(aside.failure or error)
        finally:
            aside.end()
        watch.mark_gradients()
        recording = ending.finish(failed=bool(problem), ended=ended)
        if ending.later is not None:
            problem = line = ""  # the steps asked for were seen
    classify(recording)
    recording = replace(recording, alloc_conf=recorder.alloc_conf or _settings())
    return Result(
        recording=recording,
        problem=problem,
        line=line,
        traceback=trace,
        guesses=list(recorder.guesser.branches),
        backwards=watch.backwards,
        steps=max(watch.steps.values(), default=0),
    )


def _installed(request: Request) -> FakeRecorder:
    """The recorder, and all that makes torch and the script's surroundings pretend."""
    from memopt.estimators.fake.recorder import FakeRecorder
    from memopt.estimators.fake.script import files as fake_files
    from memopt.estimators.fake.script import loaders as fake_loaders
    from memopt.estimators.fake.script import surroundings as fake_script
    from memopt.estimators.fake.values import lazy as fake_lazy
    from memopt.estimators.fake.values import tensors as fake_tensors
    from memopt.estimators.fake.values.guess import Guesser

    recorder = FakeRecorder(
        request.target,
        hidden=request.hidden,
        guesser=Guesser(frozenset(request.flipped), least=request.least),
    )
    fake_tensors.install(recorder)
    fake_lazy.install(recorder)
    fake_files.install(recorder)
    fake_loaders.install(recorder)
    fake_script.install(recorder)
    if request.target == "cuda":
        from memopt.estimators.fake.gpu import cuda as fake_cuda

        fake_cuda.install(recorder, request)
    return recorder


def _execute(request: Request, aside: Aside) -> None:
    """The script, and what it does at exit; raises what it ends with."""
    from memopt.instrument.script.command import Command, find_source
    from memopt.instrument.script.runner import prepare_main

    command = Command(tuple(request.argv), request.as_module)
    source = find_source(command)
    main = prepare_main(command, source)
    code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True)
    try:
        exec(code, main.__dict__)
    except SystemExit:
        aside.at_exit()
        raise
    aside.at_exit()


def _settings() -> str:
    """The allocator's, as the script's environment has them by now."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def _told(error: BaseException) -> tuple[str, str, str]:
    """`(what went wrong, file:line of the script, the traceback if MEMOPT_TRACEBACK asks for it)`."""
    from memopt.estimators.fake.values.lines import is_users

    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if is_users(frame.filename):
            line = f"{frame.filename}:{frame.lineno}: {frame.line or ''}"
    trace = "".join(traceback.format_exception(error)) if os.environ.get("MEMOPT_TRACEBACK") else ""
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__  # a library that imports on demand says only which of its names was asked for
    return "".join(traceback.format_exception_only(error)).strip(), line, trace


if __name__ == "__main__":
    main()
