"""What was recorded, as the trace that a profile keeps: with the script, the device, times of steps and what else is known of the run."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import msgspec

from memopt.device import Device
from memopt.growth import Saved, may_grow, may_move
from memopt.instrument.script.command import Command, find_source
from memopt.instrument.script.other_threads import threads_of_the_script
from memopt.trace import BEFORE_TRAINING, CACHE_EMPTIED, MAY_GROW, WHILE_RECORDED, Script, Trace

if TYPE_CHECKING:
    from memopt.instrument.iterations import Iterations
    from memopt.profiler.recordings import Recordings, Result, Wanted
    from memopt.profiler.timing.plain_steps import PlainSteps

_VARY = 0.02
"""Those seen are no figure of a recorded iteration that saved so much more or less."""
_ANOTHER_KIND = 3
"""Times as long as a plain step the ops of another kind of step take; those of one alike do up to 1.8 times, where they are small (a profile
slows them down)."""


@dataclass(slots=True)
class Run:
    """What is known of a run beside its recordings."""

    script: Script
    """As it was before it ran: it may change its folder, or itself."""
    wanted: Wanted
    plain: PlainSteps
    iterations: Iterations | None = None
    optimizers: set[int] = field(default_factory=set)
    """Ids of those that have stepped."""
    cut_off: int = 0
    """The iteration that was being recorded when the script ended."""

    @property
    def iterations_seen(self) -> int:
        return self.iterations.count if self.iterations is not None else 0


def describe_script(command: Command) -> Script:
    """The command as a plan keeps it, but for torch's version, which is known when the script has imported it."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    several = world.isdecimal() and int(world) > 1
    return Script(
        argv=list(command.argv),
        cwd=os.getcwd(),
        as_module=command.as_module,
        sha256=hashlib.sha256(find_source(command).read_bytes()).hexdigest(),
        python=platform.python_version(),
        torch="",
        rank=int(rank) if several and rank.isdecimal() else -1,
        world=int(world) if several else 1,
    )


def trace_of(result: Result, partial: str, recordings: Recordings, run: Run) -> Trace:
    """`partial`: why it is not of a whole iteration; empty where it is."""
    import torch

    from memopt.profiler.build import build_trace
    from memopt.profiler.timing.bandwidth import measure_device

    recorder, device = result.recorder, Device(kind=recordings.device or "cpu")
    trace = build_trace(
        recorder,
        result.usage,
        more_times_us=result.more_times_us,
        base_bytes=recorder.base_bytes,
        script=msgspec.structs.replace(run.script, torch=str(torch.__version__)),
        device=device,
        iteration=result.iteration,
        step_ms=_step_ms(result, recordings, run),
        notes=[*recordings.notes, *sorted(recorder.notes)],
        facts=_facts(result, recordings, run),
        partial=partial,
    )
    try:
        rates = run.wanted.disk_rates() if run.wanted.disk_rates is not None else None
        device = measure_device(device.kind, run.wanted.swap_dir, _room_bytes(trace, result), rates)
    except RuntimeError as error:
        device = Device(kind=device.kind, name=f"not measured: {error}"[:200])
    return msgspec.structs.replace(
        trace,
        device=device,
        updates=result.updates,
        frozen=result.frozen,
        held_beside=result.held_beside,
    )


def _room_bytes(trace: Trace, result: Result) -> int:
    """What may be taken between iterations: as much as the iteration itself took, or on a GPU the script until now."""
    from memopt.instrument.memory.outside import was_above_now_bytes

    if trace.device.kind == "cuda":
        return was_above_now_bytes("cuda")
    return 0 if result.recorder.sends_away else trace.peak_bytes - trace.base_bytes


def _step_ms(result: Result, recordings: Recordings, run: Run) -> float:
    """A plain iteration: those seen, or, where all were offloaded, the ops alone. A single one seen, an early one, may have been slow: it takes
    no longer than the recorded ops and what the script does between them. Where these take far longer, those seen were of another kind (a script
    that takes turns), and no figure of this one. Where those seen saved other amounts, a step is taken to be as long as it saves elements."""
    shares = [result.saved_elements / each if each else 1.0 for _, each in recordings.saved_before]
    seen_ms, usage = run.plain.step_ms(recordings.recorded_ms, shares), result.usage
    if usage is None:
        return seen_ms
    ops_ms = sum(usage.time_us) / 1000
    if result.recorder.sends_away or 0 < _ANOTHER_KIND * seen_ms < ops_ms:
        return ops_ms
    if run.plain.several and all(abs(each - 1) <= _VARY for each in shares):
        return seen_ms
    return min(seen_ms or inf, ops_ms + result.recorder.between.total_ms)


def _facts(result: Result, recordings: Recordings, run: Run) -> dict[str, int]:
    from memopt.instrument.stepping.single_parameter_step import several_processes

    recorder, iterations = result.recorder, run.iterations
    cut_off = {"stopped_at_op": len(recorder.ops) - 1} if run.cut_off == result.iteration else {}
    return cut_off | {
        "optimizers": len(run.optimizers),
        "in_first_round": iterations.in_first_round if iterations is not None else 0,
        "backward_calls": recorder.backward_calls,
        "keep_graph": recorder.keep_graph,
        "create_graph": recorder.create_graph,
        "grad_calls": recorder.grad_calls,
        **({"compiled": 1} if recorder.runs_compiled else {}),
        "other_threads": len(threads_of_the_script()),
        "several_processes": int(several_processes()),
        **{f"{CACHE_EMPTIED}{line}": count for line, count in recorder.cache_emptied.items()},
        **({WHILE_RECORDED: most} if (most := _most_while_recorded(result)) else {}),
        **({BEFORE_TRAINING: before} if (before := recordings.before_training_bytes) else {}),
        **({MAY_GROW: percent} if (percent := _may_grow_percent(result, recordings)) > 100 else {}),
        "iterations_seen": run.iterations_seen,
        "boundary_is_backward": int(iterations is not None and iterations.boundary == "backward"),
    }


def _most_while_recorded(result: Result) -> int:
    """Bytes on the device, where saved tensors were out of the way; 0 elsewhere, where that is the peak."""
    usage, recorder = result.usage, result.recorder
    if usage is None or not recorder.sends_away:
        return 0
    return recorder.base_bytes + max([*usage.high_bytes, usage.high_after_bytes])


def _may_grow_percent(result: Result, recordings: Recordings) -> int:
    """As those before it tell."""
    sizes, slots, storages = result.saved_sizes, result.recorder.slots, result.recorder.storages
    kinds = [storages[slot.storage].category in ("parameter", "buffer") for slot in slots]
    saved = Saved.of(zip((slot.storage for slot in slots), sizes, kinds, strict=True))
    others = [each.saved_sizes for each in recordings.earlier]
    may = may_grow(saved, len(sizes), [(len(each), sum(each)) for each in others])
    return round(100 * max([may, *(may_move(sizes, each) for each in others)]))
