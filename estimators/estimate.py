"""From a recorded sequence of storages to answers: allocated, reserved, process, by category and by module, and where it fits."""

from __future__ import annotations

import shlex
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memopt.devices import DeviceSpec, common_gpus, find_device
from memopt.errors import MemoptError, NotPossibleHere, UsageError
from memopt.estimators.allocator.replay import AllocatorEvents, AllocatorOutcome, replay, smallest_that_runs
from memopt.estimators.allocator.settings import AllocatorSettings, parse_settings
from memopt.estimators.curve import Curve, curve_of
from memopt.estimators.error_bars import error_bar
from memopt.estimators.fake.script.request import request_on
from memopt.estimators.fake.script.run import record_script
from memopt.estimators.hidden.calibrated import Calibration, calibrated_by, calibration_of
from memopt.estimators.recording import Recording
from memopt.units import format_bytes

DEFAULT_DEVICE = "a100-80gb"
SCHEMA = "memopt.estimate/1"
"""Of what `--json` prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether the run fits on one device: with room for what the allocator would like to reserve, only just, or not."""

    name: str
    memory_bytes: int
    verdict: str
    """`yes`, `tight` (the allocator must give cached memory back and retry) or `no`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a training run would need. Bytes on the device; on a CPU the peak of tensor bytes."""

    target: str
    device: str
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int | None
    context_bytes: int
    smallest_bytes: int | None
    """The least that the allocator can run in, without the context."""
    error: dict[str, float]
    """Half-width of the error bar as a share, by answer."""
    left_out: list[str]
    unfollowed: str = ""
    """Of a script: up to where it was followed, if not to its end."""
    partial: bool
    notes: list[str]
    by_category: dict[str, int]
    """At the peak of allocated bytes."""
    by_module: dict[str, int]
    peak_phase: str
    peak_op: str
    fits: list[Fit] = field(default_factory=list)
    fits_named: Fit | None = None
    method: str = ""
    """Of an estimate from a profile: `replayed`, `re-traced` or `scaled`."""
    lacks: list[str] = field(default_factory=list)
    """Of `left_out`, what may be needed and has no known amount: then the answers are lower bounds."""
    bounded: list[str] = field(default_factory=list)
    """Lines on which sizes depend on data, and what was taken there: the answers above are upper bounds."""
    most_bytes: dict[str, int] = field(default_factory=dict)
    """By answer, and for `smallest`, what is needed where all that `left_out` gives an amount for is taken: what must fit."""
    range_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Then, by answer, what is needed when least is selected there and when most is; without it the least is not known."""
    curve: Curve | None = None
    """Bytes over the run."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        from dataclasses import asdict

        return {"schema": SCHEMA, **asdict(self)}


def estimate_script(
    argv: list[str],
    *,
    device: str = DEFAULT_DEVICE,
    as_module: bool = False,
    alloc_conf: str = "",
    steps: int | None = None,
    further: bool | None = None,
    timeout_s: float = 600.0,
    calibration: Path | None = None,
) -> Estimate:
    """The peak memory of training with the script `argv` on `device` (`cpu`: this machine's own operators).

    `calibration`: file of what `memopt calibrate` measured on such a device, in place of the user's own.
    Followed are so many `steps`, or three; and `further` what comes after them while that is quick, unless steps are given.

    Raises `NotPossibleHere` when the script cannot be followed, or puts nothing on the GPU that was asked about.
    """
    spec = calibrated_by(find_device(device), calibration)
    further = steps is None if further is None else further
    request = request_on(spec, argv, as_module=as_module, steps=steps, further=further)
    recording, partial = record_script(request, timeout_s=timeout_s)
    _refuse_idle(recording, spec, shlex.join(["-m", *argv] if as_module else argv))
    found = estimate_recording(recording, spec, alloc_conf=alloc_conf, partial=partial)
    return replace(found, unfollowed=_unfollowed(recording))


def _refuse_idle(recording: Recording, spec: DeviceSpec, command: str) -> None:
    """Raise where the script trains nothing on the device that was asked about: what it needs there is no answer."""
    peak_bytes, _ = recording.peak()
    if recording.target == "cpu":
        if not peak_bytes:
            raise NotPossibleHere(
                "the script made no tensor: there is nothing to estimate",
                why="what it starts (another script, a subprocess) is not followed",
                try_="memopt estimate SCRIPT, with the one that trains",
            )
        return
    if peak_bytes and not recording.trains_elsewhere:
        return
    what, why = "the script put nothing on the GPU", "no tensor was made on cuda or moved there"
    if peak_bytes:
        what = "the script trains on the CPU"
        why = (
            f"no parameter was made on cuda or moved there, only other tensors of {format_bytes(peak_bytes)}"
        )
    raise NotPossibleHere(
        f"{what}: there is nothing to estimate for {spec.name}",
        why=f"{why}, so the model would train on the CPU; model.to('cuda') and batches on cuda in the script change that",
        try_=f"memopt estimate --device cpu {command}",
    )


def estimate_recording(
    recording: Recording,
    spec: DeviceSpec,
    *,
    alloc_conf: str = "",
    partial: bool = False,
    context_bytes: int | None = None,
) -> Estimate:
    """The answers for a recorded sequence on the device `spec`; `context_bytes` where the CUDA context was measured."""

    def answered(each: Recording) -> Estimate:
        if each.target == "cpu":
            return _on_cpu(each, spec, partial)
        return _on_gpu(each, spec, alloc_conf, partial, context_bytes)

    found = answered(recording)
    if not recording.bounded:
        return found
    ranges: dict[str, tuple[int, int]] = {}
    if recording.least is not None:
        least, most = _by_answer(answered(recording.least)), _by_answer(found)
        ranges = {name: (min(least[name], most[name]), most[name]) for name in most}
    return replace(found, bounded=recording.bounded, range_bytes=ranges)


def _by_answer(found: Estimate) -> dict[str, int]:
    """Bytes by the names that the error bars have."""
    sizes = {
        "allocated": found.allocated_bytes,
        "reserved": found.reserved_bytes,
        "process": found.process_bytes or 0,
    }
    return {name: sizes[name] for name in found.error}


def _on_cpu(recording: Recording, spec: DeviceSpec, partial: bool) -> Estimate:
    peak, at = recording.peak()
    most = peak + recording.possible_bytes
    return Estimate(
        target="cpu",
        device=spec.name,
        allocated_bytes=peak,
        reserved_bytes=peak,
        process_bytes=None,
        context_bytes=0,
        smallest_bytes=None,
        error={"allocated": error_bar(recording).allocated},
        left_out=[
            "Python's and torch's own memory",
            "what NumPy and the data loader hold outside tensors",
            *_possible(recording),
            *recording.lacks,
        ],
        lacks=recording.lacks,
        partial=partial,
        notes=[*_before_training(recording, at), *recording.notes],
        fits_named=Fit(
            name=spec.name,
            memory_bytes=spec.memory_bytes,
            verdict="yes" if most <= spec.memory_bytes else "no",
        ),
        most_bytes={"allocated": most},
        curve=curve_of(recording, at),
        **_at_peak(recording, at),
    )


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A recording's events in the caching allocator."""

    events: AllocatorEvents
    free: AllocatorOutcome
    """Without limits."""
    smallest_bytes: int | None

    @staticmethod
    def of(recording: Recording, settings: AllocatorSettings) -> _Replayed:
        events = AllocatorEvents.of(list(recording.allocations()))
        smallest: int | None = None
        with suppress(MemoptError):
            smallest = smallest_that_runs(events, settings)
        return _Replayed(events, replay(events, settings), smallest)

    @property
    def least_bytes(self) -> int:
        return self.smallest_bytes or self.free.peak_reserved_bytes


def _on_gpu(
    recording: Recording, spec: DeviceSpec, alloc_conf: str, partial: bool, context_bytes: int | None
) -> Estimate:
    settings, settings_note = _settings(recording, alloc_conf)
    calibration = calibration_of(spec)
    context, uncertainty = _context(calibration) if context_bytes is None else (context_bytes, 0)
    told = _Replayed.of(recording, settings)
    most = _Replayed.of(recording.at_most(), settings) if recording.possible else told
    outcome, _ = _there(told, settings, spec, context)
    fullest, named = _there(most, settings, spec, context)
    _, at = recording.peak(512)
    process = outcome.peak_reserved_bytes + context
    bar = error_bar(recording)
    least, wanted = most.least_bytes + context, most.free.peak_reserved_bytes + context
    return Estimate(
        target="cuda",
        device=spec.name,
        allocated_bytes=outcome.peak_allocated_bytes,
        reserved_bytes=outcome.peak_reserved_bytes,
        process_bytes=process,
        context_bytes=context,
        smallest_bytes=told.smallest_bytes,
        error={
            "allocated": bar.allocated,
            "reserved": bar.reserved,
            "process": round((bar.reserved * outcome.peak_reserved_bytes + uncertainty) / max(process, 1), 3),
        },
        most_bytes={
            "allocated": max(outcome.peak_allocated_bytes, fullest.peak_allocated_bytes),
            "reserved": max(outcome.peak_reserved_bytes, fullest.peak_reserved_bytes),
            "process": max(process, fullest.peak_reserved_bytes + context),
            "smallest": max(told.least_bytes, most.least_bytes),
        },
        left_out=[*_no_context(spec, context), *_possible(recording), *recording.lacks],
        lacks=recording.lacks,
        partial=partial,
        notes=[
            *_unused(recording, outcome.peak_allocated_bytes),
            *_before_training(recording, at),
            *settings_note,
            *recording.notes,
            *calibration.notes(),
        ],
        fits=[_fit(each, settings, context, wanted, least) for each in common_gpus()],
        fits_named=named,
        curve=curve_of(recording, at),
        **_at_peak(recording, at),
    )


def _settings(recording: Recording, alloc_conf: str) -> tuple[AllocatorSettings, list[str]]:
    """The allocator's settings: those asked for, else the script's own, which a note tells; and its memory fraction."""
    notes = []
    try:
        settings = parse_settings(alloc_conf or recording.alloc_conf)
        if recording.alloc_conf and not alloc_conf:
            notes = [f"allocator settings as the script has them: {recording.alloc_conf}"]
    except UsageError as error:
        if alloc_conf:
            raise
        settings = AllocatorSettings()
        notes = [f"the script's allocator settings were not followed: {error.what}"]
    if recording.memory_fraction < 1:
        settings = replace(settings, per_process_memory_fraction=recording.memory_fraction)
    return settings, notes


def _there(
    replayed: _Replayed, settings: AllocatorSettings, spec: DeviceSpec, context_bytes: int
) -> tuple[AllocatorOutcome, Fit]:
    """How the run goes on `spec` itself, whose limits change it where they bind."""
    limit, room = settings.limit_bytes(spec.memory_bytes), spec.memory_bytes - context_bytes
    free = replayed.free
    outcome, verdict = free, "yes"
    if free.peak_reserved_bytes > min(room, room if limit is None else limit) or settings.collects:
        bound = replay(replayed.events, settings, limit, device_bytes=max(room, 0))
        verdict = "no" if not bound.ran else "tight" if bound.retries else "yes"
        outcome = bound if bound.ran else free
    return outcome, Fit(name=spec.name, memory_bytes=spec.memory_bytes, verdict=verdict)


def _fit(
    spec: DeviceSpec, settings: AllocatorSettings, context_bytes: int, wanted_bytes: int, least_bytes: int
) -> Fit:
    limit = settings.limit_bytes(spec.memory_bytes)
    most = spec.memory_bytes if limit is None else min(spec.memory_bytes, limit + context_bytes)
    verdict = "yes" if wanted_bytes <= most else "tight" if least_bytes <= most else "no"
    return Fit(name=spec.name, memory_bytes=spec.memory_bytes, verdict=verdict)


def _no_context(spec: DeviceSpec, context_bytes: int) -> list[str]:
    if context_bytes:
        return []
    return [
        f"what the driver's context and kernels take on {spec.name}: no figure is known (memopt calibrate)"
    ]


def _context(calibration: Calibration) -> tuple[int, int]:
    """`(bytes, uncertainty)` of the CUDA context and the kernels loaded into it."""
    amount = calibration.hidden.process()
    return amount.size_bytes, max(amount.high_bytes - amount.size_bytes, amount.size_bytes - amount.low_bytes)


def _unused(recording: Recording, peak_bytes: int) -> list[str]:
    """What to say first where the model trains elsewhere."""
    way_out = "memopt estimate --device cpu, or a script that moves its model there (.to('cuda'))"
    if not peak_bytes:
        return [f"nothing was put on the GPU: what is told is an idle one; {way_out}"]
    if not recording.trains_elsewhere:
        return []
    return [f"no parameter was put on the GPU: the model trains on the CPU; {way_out}"]


_NEAR = 0.95


def _before_training(recording: Recording, at: int) -> list[str]:
    """What to say where the peak is passed before anything is trained: training itself, which a profile tells of, takes less."""
    first = next((mark for kind, mark in recording.marks if kind == "step"), None)
    if first is None or at > first:
        return []
    peak, later = recording.peak()[0], recording.peak(after=first)[0]
    if not 0 < later <= _NEAR * peak:
        return []
    return [f"the peak comes before the first optimizer step is done; after it, up to {format_bytes(later)}"]


def _possible(recording: Recording) -> list[str]:
    if not recording.possible_bytes:
        return []
    most = format_bytes(recording.possible_bytes)
    if recording.target == "cpu":
        return [
            f"batches that loader workers deliver before their turn: up to {most}, one of each other worker"
        ]
    return [
        f"cuDNN's convolution workspaces: up to {most} inside one convolution, if cuDNN picks such a kernel"
    ]


def _unfollowed(recording: Recording) -> str:
    """What was not followed: what comes after some step, what threads compute."""
    found = []
    if not recording.marks or recording.marks[-1][0] != "end":
        steps = sum(1 for kind, _ in recording.marks if kind == "step")
        where = f"optimizer step {steps}" if steps else "the steps that were asked for"
        found.append(
            f"followed up to {where}: what only comes after that (evaluation, checkpoints) is not counted"
        )
    if recording.aside:
        at = f" ({Path(recording.aside[0]).name})" if recording.aside[0] else ""
        found.append(f"what the script computes in a thread{at} is not counted")
    return "; ".join(found)


def _at_peak(recording: Recording, event_count: int) -> dict[str, Any]:
    categories: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for index in recording.live_after(event_count):
        row = recording.rows[index]
        categories[row.category] += row.size_bytes
        modules[row.module or "(outside modules)"] += row.size_bytes
    last = recording.rows[abs(recording.events[event_count - 1]) - 1] if event_count else None
    return {
        "by_category": dict(categories.most_common()),
        "by_module": dict(modules.most_common()),
        "peak_phase": last.phase if last else "",
        "peak_op": last.op if last else "",
    }
