"""Run a person's script on fake tensors, in a subprocess that cannot hurt this one, and bring back what it recorded."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from memopt.errors import NotPossibleHere
from memopt.estimators.fake.script.request import Request, Result
from memopt.estimators.recording import Recording
from memopt.instrument.script.command import Command, find_source
from memopt.version import IMPORT_ROOT

_FLIPS = 4
_START = "import sys; sys.path.append({root!r}); from memopt.estimators.fake.script.child import main; main()"


def record_script(request: Request, *, timeout_s: float = 600.0) -> tuple[Recording, bool]:
    """`(recording, partial)` of the script in `request`; partial when it failed after at least one whole step.

    Where sizes depend on data, the script is run twice: with the largest, and with the smallest (`Recording.least`).

    Raises `UsageError` when there is no such script and `NotPossibleHere` when it cannot be followed, with its line.
    """
    find_source(Command(tuple(request.argv), request.as_module))
    flipped: list[str] = []
    first: Result | None = None
    for _ in range(_FLIPS):
        result = _run(msgspec.structs.replace(request, flipped=flipped), timeout_s)
        first = first or result
        if not result.problem:
            return _with_least(_noted(result, flipped), request, flipped, timeout_s), False
        untried = [line for line in reversed(result.guesses) if line not in flipped]
        if not untried:
            break
        flipped = [*flipped, untried[0]]
    assert first is not None
    result = first
    if result.steps or result.backwards > 1:
        note = f"the script failed after {result.steps} optimizer steps: {result.problem.splitlines()[-1]} ({result.line})"
        return replace(result.recording, notes=[*result.recording.notes, note]), True
    raise _failed(result, request)


def _with_least(recording: Recording, request: Request, flipped: list[str], timeout_s: float) -> Recording:
    """With the run of the smallest sizes beside it, where sizes depend on data."""
    if not recording.bounded:
        return recording
    asked = msgspec.structs.replace(request, flipped=flipped, least=True)
    try:
        result = _run(asked, timeout_s)
    except NotPossibleHere:
        return recording
    return recording if result.problem else replace(recording, least=result.recording)


def _noted(result: Result, flipped: list[str]) -> Recording:
    recording = result.recording
    notes = list(recording.notes)
    if flipped:
        notes.append(
            "the script raised after a first guess; the other truth value was taken at " + ", ".join(flipped)
        )
    if not result.backwards:
        notes.append("the script ran no backward pass: what is estimated is what it did")
    elif not result.steps:
        notes.append("no optimizer of torch.optim made a step: backward calls were counted instead")
    return replace(recording, notes=notes)


def _run(request: Request, timeout_s: float) -> Result:
    with tempfile.TemporaryDirectory(prefix="memopt-fake-") as folder:
        asked, told, log = Path(folder, "request.json"), Path(folder, "result.json"), Path(folder, "log")
        asked.write_bytes(msgspec.json.encode(request))
        with log.open("wb") as output:
            try:
                code = _wait_for([str(asked), str(told)], output, timeout_s)
            except subprocess.TimeoutExpired:
                raise NotPossibleHere(
                    f"{request.argv[0]} did not finish {request.steps} training steps on fake tensors in {timeout_s:.0f} s",
                    why=_tail(log) or "it printed nothing",
                    try_="--timeout, fewer --steps, or a smaller data set: only shapes matter",
                ) from None
        if told.is_file() and code == 0:
            return msgspec.json.decode(told.read_bytes(), type=Result)
        raise NotPossibleHere(
            f"{request.argv[0]} could not be followed on fake tensors",
            why=f"the process ended with {_ending(code)}: {_tail(log) or 'it printed nothing'}",
            try_=_for_real(request),
        )


def _wait_for(arguments: list[str], output: BinaryIO, timeout_s: float) -> int:
    """The exit code of the process that runs the script; raises `subprocess.TimeoutExpired`."""
    command = [sys.executable, "-c", _START.format(root=IMPORT_ROOT), *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=timeout_s, check=False
    ).returncode


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


def _tail(log: Path, lines: int = 6) -> str:
    text = log.read_bytes()[-4000:].decode(errors="replace")
    return "\n  ".join(line for line in text.splitlines() if line.strip() and not line.startswith("USDT"))[
        -1500:
    ]


def _failed(result: Result, request: Request) -> NotPossibleHere:
    at = f" at {result.line}" if result.line else ""
    guesses = [note for note in result.recording.notes if " taken to be " in note]
    why = result.problem + (f"\n  guessed before that: {'; '.join(guesses[:3])}" if guesses else "")
    if result.traceback:
        why += "\n" + textwrap.indent(result.traceback.rstrip(), "  ")
    return NotPossibleHere(
        f"the script could not be followed on fake tensors{at}",
        why=why,
        try_=_way_out(result.problem, request),
    )


_JAGGED = "shape_env must not be None"
"""What a nested tensor of the jagged layout asks of fake ones, whose sizes are numbers."""


def _for_real(request: Request) -> str:
    """The command that profiles the script, of which nothing is pretended then."""
    return shlex.join(["memopt", "profile", *(["-m"] if request.as_module else []), *request.argv])


def _way_out(problem: str, request: Request) -> str:
    if problem.startswith("ModuleNotFoundError"):
        return f"install it beside torch in this environment ({sys.executable}): the script's imports run as they are"
    if _JAGGED in problem:
        return f"a padded batch instead of a jagged nested tensor, which has no shape on fake tensors; or {_for_real(request)}"
    return _for_real(request)
