"""A recorded iteration as it would be at another batch size: bytes, times and shapes scaled, so that plans can be made for it.

What grows is found as in `batch`; the time of an op grows when it reads or writes something that does. Nothing of it is
measured: kernels have their own steps, and an op may take another algorithm at another size.
"""

from __future__ import annotations

import msgspec

from memopt.errors import MemoptError
from memopt.estimators.elsewhere.batch import grows, scaled
from memopt.estimators.elsewhere.recording import amounts_of, with_amounts
from memopt.estimators.elsewhere.retrace import argv_at
from memopt.trace import Csr, Script, Slots, Trace


def trace_at_batch(trace: Trace, batch: int, new_batch: int, flag: str | None = None) -> Trace:
    """`trace`, recorded at `batch`, at `new_batch`. Its script has the arguments for it where they can be told (`flag` names them)."""
    if new_batch == batch:
        return trace
    follows = grows(trace, batch)
    amounts = scaled(trace, amounts_of(trace), batch, new_batch)
    changed = with_amounts(trace, amounts)
    times = [_time_us(trace, op, follows, new_batch / batch) for op in range(trace.op_count)]
    total = sum(trace.ops.time_us)
    return msgspec.structs.replace(
        changed,
        script=_script(trace, batch, new_batch, flag),
        ops=msgspec.structs.replace(changed.ops, time_us=times),
        slots=_slots(trace, follows, batch, new_batch),
        step_ms=trace.step_ms * (sum(times) / total if total else new_batch / batch),
        notes=[
            *trace.notes,
            f"scaled from a recording at batch {batch} to batch {new_batch}: nothing of it is measured",
        ],
    )


def _script(trace: Trace, batch: int, new_batch: int, flag: str | None) -> Script:
    try:
        return msgspec.structs.replace(trace.script, argv=argv_at(trace, batch, new_batch, flag))
    except MemoptError:
        return trace.script


def _time_us(trace: Trace, op: int, follows: list[bool], factor: float) -> float:
    values = (*trace.ops.reads.row(op), *trace.ops.writes.row(op))
    grown = any(follows[trace.values.storage[value]] for value in values)
    return trace.ops.time_us[op] * (factor if grown else 1.0)


def _slots(trace: Trace, follows: list[bool], batch: int, new_batch: int) -> Slots:
    slots = trace.slots
    shapes, strides = [], []
    for slot, storage in enumerate(slots.storage):
        shape, stride = slots.shape.row(slot), slots.stride.row(slot)
        at = next((d for d, size in enumerate(shape) if size and size % batch == 0), -1)
        if follows[storage] and at >= 0:
            pace = stride[at] if at < len(stride) else 0
            shape = [*shape[:at], shape[at] * new_batch // batch, *shape[at + 1 :]]
            stride = [step * new_batch // batch if step > pace else step for step in stride]
        shapes.append(shape)
        strides.append(stride)
    return msgspec.structs.replace(slots, shape=Csr.of(shapes), stride=Csr.of(strides))
