"""What the process that asks for a fake run and the one that does it tell each other. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from memopt.devices import DeviceSpec
from memopt.estimators.hidden.calibrated import on_device
from memopt.estimators.hidden.hidden_memory import HiddenMemory
from memopt.estimators.recording import Recording


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Run `argv` until `steps` optimizer steps were seen."""

    argv: list[str]
    as_module: bool = False
    target: Literal["cuda", "cpu"] = "cuda"
    device: str = ""
    """Name of the pretended GPU."""
    device_memory_bytes: int = 0
    multiprocessors: int = 108
    hidden: HiddenMemory | None = None
    """Of that GPU; of an A100 where it is not told."""
    steps: int = 3
    further: bool = False
    """Go on after those while that is quick, for what only comes later."""
    flipped: list[str] = []
    """Lines whose guessed truth value is turned round."""
    least: bool = False
    """Sizes that depend on data are taken as small as they can be, not as large."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What the run recorded and how it ended; `problem` is empty when it ended well."""

    recording: Recording
    problem: str = ""
    line: str = ""
    traceback: str = ""
    """Of the problem, library frames included, if `MEMOPT_TRACEBACK` is set."""
    guesses: list[str] = []
    """Lines at which a truth value was guessed, latest last."""
    backwards: int = 0
    steps: int = 0


STEPS = 3
"""How many are followed where nobody says: the first makes the optimizer's state, the next is like all others."""


def request_on(
    spec: DeviceSpec, argv: list[str], *, as_module: bool, steps: int | None, further: bool = False
) -> Request:
    """Of `argv` on `spec`, with what a calibration measured there; without `steps` as many as it takes."""
    pretended = on_device(spec)
    return Request(
        argv=argv,
        as_module=as_module,
        target=pretended["target"],
        device=spec.title,
        device_memory_bytes=spec.memory_bytes,
        multiprocessors=spec.multiprocessors,
        hidden=pretended["hidden"],
        steps=steps or STEPS,
        further=further,
    )
