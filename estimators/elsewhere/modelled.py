"""A recorded iteration as a device that is not here would run it: modelled op times, links and memory, so that plans can be made.

Times come from the roofline in `op_time`, bytes from the recorded storages and the device's own hidden memory; nothing of it is
measured, and the Device says so. Meant for choosing between plans: single steps may be off by a third.
"""

from __future__ import annotations

import msgspec

from memopt.devices import DeviceSpec
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.elsewhere.device import on_cuda
from memopt.estimators.elsewhere.op_shapes import op_call
from memopt.estimators.elsewhere.op_time import op_time_ms
from memopt.estimators.elsewhere.recording import amounts_of, with_amounts
from memopt.estimators.hidden.calibrated import calibration_of
from memopt.trace import PHASES, Trace

_ONE_BY_ONE = 50
"""Ops of a CPU's optimizer (one parameter at a time) that one multi-tensor kernel does on a GPU, at least."""


def model_for_device(trace: Trace, spec: DeviceSpec) -> Trace:
    """`trace` on the device `spec`: op times, step time, Device and, where the kind differs, workspaces are modelled.

    Raises `NotPossibleHere` for a profile that is not whole, `UsageError` for a device that the iteration cannot be moved to.
    """
    if trace.partial:
        raise NotPossibleHere(
            f"this profile cannot be planned for {spec.name}",
            why=trace.partial,
            try_="memopt profile SCRIPT, to record a whole iteration",
        )
    if spec.kind == "cpu":
        raise UsageError(
            "only GPUs are modelled", why="a CPU is this machine", try_="memopt advise without --device"
        )
    moved = (
        trace
        if trace.device.kind == spec.kind
        else with_amounts(trace, on_cuda(trace, amounts_of(trace), spec))
    )
    times = [_time_us(trace, op, spec) for op in range(trace.op_count)]
    context = calibration_of(spec).hidden.process().size_bytes
    note = f"times and memory are modelled for {spec.title} from a recording on {trace.device.name or trace.device.kind}"
    if trace.device.kind != spec.kind:
        note += "; it may choose other operators"
    return msgspec.structs.replace(
        moved,
        device=msgspec.structs.replace(spec.device(), context_bytes=context, allocator="native"),
        ops=msgspec.structs.replace(moved.ops, time_us=times),
        step_ms=round(sum(times) / 1000, 3),
        notes=[*trace.notes, note],
    )


def _time_us(trace: Trace, op: int, spec: DeviceSpec) -> float:
    name = trace.op_name(op)
    if name.startswith("profiler."):
        return 0.0
    milliseconds = op_time_ms(op_call(trace, op), spec)
    if trace.device.kind == "cpu" and PHASES[trace.ops.phase[op]] == "optimizer" and "_foreach" not in name:
        if "_local_scalar_dense" in name:
            return 0.0  # the step count, which lies on the host
        floor = spec.launch_us / 1000
        milliseconds = max(milliseconds - floor, 0.0) + floor / _ONE_BY_ONE if milliseconds else 0.0
    return round(milliseconds * 1000, 2)
