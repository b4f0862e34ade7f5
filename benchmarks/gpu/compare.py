"""Recorded runs against estimates: peak allocated, reserved and of the device, and the recorded events against the simulated allocator."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.estimate import tell
from benchmarks.gpu.configurations import CONFIGURATIONS, STEPS
from benchmarks.gpu.record import FILE, chosen
from memopt.errors import BadFile
from memopt.estimators.allocator.settings import parse_settings
from memopt.estimators.allocator.trace import AllocatorTrace, replay_trace
from memopt.estimators.estimate import Estimate, estimate_script
from memopt.files import read_bytes

MIB = 1 << 20
ANSWERS = ("allocated", "reserved", "process")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file, as `measure.py` writes it."""

    name: str
    status: str
    device: str
    memory_bytes: int
    torch: str
    cuda: str
    cudnn: int
    allocator_conf: str
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    """By NVML, beyond what the device held before; 0 where it could not be read."""
    seconds: float
    trace: AllocatorTrace


def load_runs(folder: Path) -> list[Run]:
    """The recorded runs in `folder`. Raises `BadFile` where the file is none of ours."""
    path = folder / FILE
    try:
        lines = read_bytes(path, "recorded runs").splitlines()
        return [msgspec.json.decode(line, type=Run) for line in lines]
    except (UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise BadFile(f"{path} does not hold recorded runs", why=str(error)) from error


def predicted(run: Run) -> Estimate:
    """The estimate of the same training on that device, without it."""
    argv = ["benchmarks.gpu.train", *CONFIGURATIONS[run.name].argv]
    return estimate_script(
        argv, as_module=True, device=run.device, alloc_conf=run.allocator_conf, steps=STEPS
    )


def compare(folder: Path, only: list[str]) -> int:
    """Print a row for each run, then median and p95 by answer. Returns the number of traces not reproduced to the byte."""
    errors: dict[str, dict[str, float]] = {answer: {} for answer in ANSWERS}
    unlike = 0
    for run in load_runs(folder):
        if run.name not in chosen(only):
            continue
        if run.status != "ok":
            print(f"{run.name:42s} {run.status} on {run.device}")
            continue
        found = predicted(run)
        figures = {
            "allocated": (found.allocated_bytes, run.allocated_bytes),
            "reserved": (found.reserved_bytes, run.reserved_bytes),
            "process": (found.process_bytes or 0, run.process_bytes),
        }
        told = []
        for answer, (estimated, measured) in figures.items():
            if not measured:
                continue
            errors[answer][run.name] = estimated / measured - 1
            told.append(
                f"{answer} {estimated / MIB:8.0f} of {measured / MIB:8.0f} {errors[answer][run.name]:+7.2%}"
            )
        same = reproduced(run)
        unlike += not same
        print(
            f"{run.name:42s} {'  '.join(told)}  {'events as recorded' if same else 'EVENTS DIFFER'}",
            flush=True,
        )
    for answer in ANSWERS:
        tell(errors[answer], f"peak {answer}")
    return unlike


def reproduced(run: Run) -> bool:
    """Whether the simulated allocator puts every block where the real one did; expandable segments cannot be told."""
    if run.trace.expandable:
        return True
    result = replay_trace(run.trace, parse_settings(run.allocator_conf))
    return (
        result.same_address == result.allocations
        and result.same_reserved == result.events
        and result.peak_allocated_bytes == run.allocated_bytes
        and result.peak_reserved_bytes == run.reserved_bytes
    )
