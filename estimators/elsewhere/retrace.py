"""The script of a profile, run again on fake tensors: at another batch size, or as it would run on another kind of device."""

from __future__ import annotations

import hashlib
from contextlib import chdir
from pathlib import Path

from memopt.devices import DeviceSpec
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.elsewhere.batch import batch_arguments
from memopt.estimators.fake.script.request import request_on
from memopt.estimators.fake.script.run import record_script
from memopt.estimators.recording import Recording
from memopt.trace import CATEGORIES, Trace

_PARAMETERS = (0.95, 2.0)
"""The parameters of the run on fake tensors, by those of the profile: a copy (averaged weights) may be among them."""


def argv_at(trace: Trace, batch: int, new_batch: int, flag: str | None) -> list[str]:
    """The script's arguments for `new_batch`, set through `flag` or through the one argument that holds the batch size.

    Raises `NotPossibleHere` when no argument can be told to set it.
    """
    argv = list(trace.script.argv)
    if new_batch == batch:
        return argv
    if flag:
        return _with_flag(argv, flag, new_batch)
    found = batch_arguments(argv)
    same = [argument for argument in found if argument.value == batch]
    if len(same) == 1:
        return same[0].set(argv, new_batch)
    if not same and len(found) == 1 and found[0].value * new_batch % batch == 0:
        return found[0].set(argv, found[0].value * new_batch // batch)  # accumulation, or several processes
    what = "several arguments could" if found else "no argument is seen to"
    raise NotPossibleHere(
        f"{what} set the script's batch size",
        why=" ".join(argv),
        try_="--batch-arg=--batch-size, the script's own flag",
    )


def _with_flag(argv: list[str], flag: str, value: int) -> list[str]:
    """`argv` with the option `flag` (or, for `name=`, the override) at `value`."""
    name = flag.rstrip("=")
    for index, word in enumerate(argv[1:], 1):
        if word == name and index + 1 < len(argv) and not flag.endswith("="):
            return [*argv[: index + 1], str(value), *argv[index + 2 :]]
        if word.startswith(f"{name}="):
            return [*argv[:index], f"{name}={value}", *argv[index + 1 :]]
    return [*argv, f"{name}={value}"] if flag.endswith("=") else [*argv, name, str(value)]


def retrace(
    trace: Trace, argv: list[str], spec: DeviceSpec, *, steps: int = 3, timeout_s: float = 600.0
) -> tuple[Recording, bool]:
    """`(recording, partial)` of the script with `argv` in its own folder. Raises `NotPossibleHere` when it cannot be
    followed, or when it turns out to train something else than the profile's model."""
    request = request_on(spec, argv, as_module=trace.script.as_module, steps=steps)
    folder = Path(trace.script.cwd)
    if not argv or not folder.is_dir():
        raise NotPossibleHere("the profile's script cannot be run again", why=f"there is no folder {folder}")
    try:
        with chdir(folder):
            recording, partial = record_script(request, timeout_s=timeout_s)
    except (UsageError, OSError) as error:
        raise NotPossibleHere("the profile's script cannot be run again", why=str(error)) from error
    _same_model(trace, recording)
    return recording, partial


def _same_model(trace: Trace, recording: Recording) -> None:
    kind = CATEGORIES.index("parameter")
    was = sum(
        size
        for size, each in zip(trace.storages.size_bytes, trace.storages.category, strict=True)
        if each == kind
    )
    now = sum(row.size_bytes for row in recording.rows if row.category == "parameter")
    if not _PARAMETERS[0] * was <= now <= _PARAMETERS[1] * max(was, 1):
        raise NotPossibleHere(
            "the run on fake tensors is not the profile's",
            why=f"its parameters take {now} bytes on this device, the profile's {was}"
            + ("" if now else ": nothing was put there"),
            try_="a script that asks for the device, or --method scale, which takes the recorded iteration as it was",
        )


def script_changed(trace: Trace) -> bool:
    """Is the script's file another one than when the profile was recorded?"""
    script = trace.script
    if not script.sha256 or not script.argv or script.as_module:
        return False
    try:
        return hashlib.sha256(Path(script.cwd, script.argv[0]).read_bytes()).hexdigest() != script.sha256
    except OSError:
        return True
