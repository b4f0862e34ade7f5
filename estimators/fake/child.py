"""The subprocess that runs a script on fake tensors: `python -m memopt.estimators.fake.child request.json result.json`.

It exists so that nothing that the script or torch's fake mode does can hurt the process that asked.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from memopt.estimators.fake.request import Request, Result

_PATIENCE_S = 4.0
"""After so much work, steps that are alike are not followed on."""


_TURNS = 6
"""How often one optimizer may step for each step of another: WGAN's critic does five times."""


class Enough(BaseException):
    """Raised through the script when enough steps were seen."""


def main() -> None:
    """Read the request, run the script, write the result."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    result_path = Path(sys.argv[2])
    result = _run(request)
    result_path.write_bytes(msgspec.json.encode(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(request: Request) -> Result:
    from memopt.estimators.fake import files as fake_files
    from memopt.estimators.fake import lazy as fake_lazy
    from memopt.estimators.fake import script as fake_script
    from memopt.estimators.fake import tensors as fake_tensors
    from memopt.estimators.fake.guess import Guesser
    from memopt.estimators.fake.record import FakeRecorder
    from memopt.estimators.recording import classify

    recorder = FakeRecorder(
        request.target,
        hidden=request.hidden,
        guesser=Guesser(frozenset(request.flipped), least=request.least),
    )
    fake_tensors.install(recorder)
    fake_lazy.install(recorder)
    fake_files.install(recorder)
    fake_script.install(recorder)
    if request.target == "cuda":
        from memopt.estimators.fake import cuda as fake_cuda

        fake_cuda.install(recorder, request)
    problem, line = "", ""
    with recorder:
        watch = recorder.watch
        assert watch is not None
        _stop_after(watch, request.steps)
        try:
            _execute(request)
        except Enough:
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0) and not watch.backwards:
                problem = f"the script exited with {stop.code}"
        except BaseException as error:
            problem, line = _told(error)
        watch.mark_gradients()
        recording = recorder.finish()
    classify(recording)
    recording = replace(recording, alloc_conf=recorder.alloc_conf or _settings())
    return Result(
        recording=recording,
        problem=problem,
        line=line,
        guesses=list(recorder.guesser.branches),
        backwards=watch.backwards,
        steps=max(watch.steps.values(), default=0),
    )


def _stop_after(watch: Any, steps: int) -> None:
    """Stop when the optimizer has stepped `steps` times; of several each twice as often, since such scripts may step twice
    in an iteration (lazy penalties), or the first one many times more, since some never step. Without one, count backward calls."""
    import torch

    made: weakref.WeakSet[Any] = weakref.WeakSet()
    optimizer: Any = torch.optim.Optimizer
    init = optimizer.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.add(self)
        init(self, *args, **kwargs)

    optimizer.__init__ = counted

    left: list[int] = []

    def stepped() -> None:
        done = next(iter(watch.steps.values()), 0)
        least = min((watch.steps.get(id(each), 0) for each in made), default=done)
        wanted = steps if len(made) < 2 else 2 * steps
        if done >= wanted and (least >= wanted or done >= _TURNS * steps):
            raise Enough
        if done == len(left) + 1:
            left.append(watch.recorder.live_bytes)
            alike = done >= 2 and left[-1] == left[-2]
            if alike and time.process_time() > _PATIENCE_S and (least or done >= steps):
                watch.recorder.guesser.remark(
                    f"step {done} left memory as step {done - 1} had: no more were followed"
                )
                raise Enough

    def went_backward() -> None:
        if not made and watch.backwards >= steps + 1:
            raise Enough

    watch.on_step = stepped
    watch.on_backward = went_backward


def _execute(request: Request) -> None:
    from memopt.instrument.runner import Command, _prepare, find_source

    command = Command(tuple(request.argv), request.as_module)
    source = find_source(command)
    main = _prepare(command, source)
    code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _settings() -> str:
    """The allocator's, as the script's environment has them by now."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def _told(error: BaseException) -> tuple[str, str]:
    """`(what went wrong, file:line of the script)`."""
    from memopt.estimators.fake.guess import is_users

    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if is_users(frame.filename):
            line = f"{frame.filename}:{frame.lineno}: {frame.line or ''}"
    if os.environ.get("MEMOPT_TRACEBACK"):
        traceback.print_exception(error)
    text = "".join(traceback.format_exception_only(error)).strip()
    return text, line


if __name__ == "__main__":
    main()
