"""What a plan's own work costs: watching ops and saved tensors, running ops again, and the copies to and from a tier, which a CPU's cores make
and a GPU's host has to queue."""

from __future__ import annotations

import re

from memopt.device import Device
from memopt.estimators.simulator.sums import on_grid
from memopt.trace import PHASES, Trace, ops_of_phase

MODE_MS = 0.007
"""Per forward op: what watching it costs, where a plan has actions and there is nothing to do. Fitted, with `HOOK_MS`, to scripts of thousands of
tiny ops (two LSTMs unrolled by hand, a neural ODE, a tree RNN)."""
HOOK_MS = 0.014
"""Per saved tensor: the hooks that pack and unpack it, likewise."""
REPLAY_MS = 0.02
"""Per replayed op on a CPU, on top of the op itself: calling it again. Fitted, with `MAKE_MS` and `LOOKUP`, to an LSTM, an ODE and a chain of 80
small blocks at 80 to 20 % of their peaks (59 to 743 tensors made again by 59 to 2,605 ops), on two quiet cores."""
MAKE_MS = 0.1
"""Per tensor that is made again on a CPU: remembering how, and finding that again."""
LOOKUP = 1.35
"""Times as long as watching alone takes finding out what there is to do, on a CPU."""
_REPLAY_BESIDE_GPU_MS = 0.05
"""Per replayed op where a GPU runs it: all of the three, which were not measured one by one there."""
NODE_MS = 0.001
"""Per op of backward: the look at its node."""
_OWN_NODE = re.compile(r"\w+Backward\d+|")
"""A node of torch's, or one whose name was not recorded."""
HANDOVER_MS = 0.5
"""Per copy to or from the disk tier of a CPU: what its threads cost the kernels, which wait for the core and the interpreter's lock that
such a thread holds. Fitted, with `ONE_CORE`, to the swaps of three examples on two cores; their own time hides behind other ops."""
ONE_CORE = 2.0
"""Times as long as the kernels' own copy, on all cores, takes a thread of the tier."""
QUEUE_MS = 0.05
"""Per copy to or from the host tier of a GPU: packed or unpacked, a place found, events recorded and waited for."""
LAUNCH_MS = 0.02
"""Per kernel of a codec on a GPU: its launch, and a share of what packs and unpacks. 25 dropout masks of GPT-2 took 21 ms on the host of an H100
that has a pace of 2.65, of 16 kernels each."""
CODE_MS = 0.15
"""Per tensor that a codec encodes, or decodes, on a CPU, beside its passes over the bytes: finding out how, and arrays over them. 26 dropout masks of
half a MiB took 0.32 and 0.26 ms each in nanoGPT, of which the passes are 0.12 and 0.07."""
_LEAST, _LEAST_BESIDE_GPU, _MOST = 0.3, 1.0, 20.0
"""Of `pace_of`. A GPU that is busy hides what the host does, and no measurement of one plain iteration tells how much more it would hide."""
_ERRORS = 1.0
"""So many standard errors from what was measured the costs above are still taken for true."""


def usual_ms(trace: Trace) -> float:
    """What watching `trace` takes, and finding out what there is to do, where the costs above were fitted."""
    watching_ms = _usual_ms(_watched_ops(trace), len(trace.slots.node))
    return watching_ms * (LOOKUP if trace.device.kind == "cpu" else 1.0)


def _watched_ops(trace: Trace) -> int:
    """Ops of forward that are watched: none before the first saved tensor, unless that is one outside the modules."""
    slots = trace.slots
    outside = any(trace.strings[module] == "@" for module in set(slots.module))
    first = 0 if outside else min(slots.packed_before, default=0)
    return trace.ops.phase[max(0, first - 1) :].count(PHASES.index("forward"))


def hooks_ms(trace: Trace) -> float:
    """What the hooks alone take, where ops are not watched."""
    return _usual_ms(0, len(trace.slots.node))


def replay_ms(device: Device) -> float:
    """What running one op again takes on top of the op, at a pace of 1."""
    return REPLAY_MS if device.kind == "cpu" else _REPLAY_BESIDE_GPU_MS


def make_ms(device: Device) -> float:
    """What making one tensor again takes on top of the ops that do, at a pace of 1."""
    return MAKE_MS if device.kind == "cpu" else 0.0


def backward_ms(trace: Trace) -> float:
    """What watching backward takes as well, while weights are away: its nodes are looked at, and each op is seen where one of them may read
    a weight that it has not saved."""
    own = all(_OWN_NODE.fullmatch(trace.strings[name]) for name in set(trace.slots.node))
    return ops_of_phase(trace, "backward") * (NODE_MS if own else MODE_MS)


def pace_of(trace: Trace) -> float:
    """How many times as long memopt's own code takes in this script, on this machine: 1 where that was not measured.

    The same code takes three times as long in a model of many kinds of ops as in a loop of a few, whose every step the caches hold."""
    measured = trace.watching
    if measured is None or not measured.ops:
        return 1.0
    usual = _usual_ms(measured.ops, measured.tensors)
    off = _ERRORS * measured.error_ms
    found = min(max(usual, measured.cost_ms - off), measured.cost_ms + off)
    least = _LEAST if trace.device.kind == "cpu" else _LEAST_BESIDE_GPU
    return min(max(found / usual, least), _MOST)


def handling_ms(size_bytes: int, device: Device, pace: float) -> float:
    """What one copy to or from a tier takes beside the link: staging on a CPU; elsewhere queueing it, at the `pace` of the host."""
    return staging_ms(size_bytes, device) if device.kind == "cpu" else on_grid(QUEUE_MS * pace)


def staging_ms(size_bytes: int, device: Device) -> float:
    """What one copy to or from a tier takes of the cores that compute, on a CPU; 0 elsewhere."""
    if device.kind != "cpu" or device.copy_bytes_per_s <= 0:
        return 0.0
    return on_grid(HANDOVER_MS + ONE_CORE * size_bytes / device.copy_bytes_per_s * 1000)


def _usual_ms(ops: int, tensors: int) -> float:
    return MODE_MS * ops + HOOK_MS * tensors
