"""The neutral graph of a recorded iteration: a profile that graph strategies can plan.

Every value that an op wrote into memory born in the iteration is a tensor (a mutation writes a new one); what was there before is resident,
and ops that change it run once (but batch norm, whose replay leaves its statistics alone). What is still there when the iteration
ends is kept.
"""

from __future__ import annotations

from memopt.advisors.graphs.graph import SCHEMA, GraphFile, OpRow, TensorRow
from memopt.trace import HIDDEN_STATE, PHASES, REPLAYABLE, Trace


def graph_of(trace: Trace, name: str) -> GraphFile:
    """The graph of `trace`, where tensor ids are values of the trace or, for residents, storages beyond them."""
    values, storages = trace.values, trace.storages
    before = [birth < 0 for birth in storages.birth_op]
    first = len(values.storage)
    ids = [first + storage if before[storage] else value for value, storage in enumerate(values.storage)]
    tensors = [
        TensorRow(id=first + storage, bytes=size, name=trace.storage_label(storage), resident=True)
        for storage, size in enumerate(storages.size_bytes)
        if before[storage]
    ]
    ops: list[OpRow] = []
    made: set[int] = set()
    for op in range(trace.op_count):
        reads = [
            ids[value] for value in trace.ops.reads.row(op) if before[values.storage[value]] or value in made
        ]
        written = trace.ops.writes.row(op)
        writes = [value for value in written if not before[values.storage[value]]]
        made.update(writes)
        flags = trace.ops.flags[op]
        changes = any(before[values.storage[value]] for value in written)
        ops.append(
            OpRow(
                name=trace.op_name(op),
                ms=trace.ops.time_us[op] / 1000,
                reads=list(dict.fromkeys(reads)),
                writes=writes,
                phase=PHASES[trace.ops.phase[op]],
                workspace_bytes=trace.ops.workspace_bytes[op],
                replayable=bool(flags & REPLAYABLE) and (not changes or bool(flags & HIDDEN_STATE)),
            )
        )
    tensors += [
        TensorRow(
            id=value,
            bytes=storages.size_bytes[values.storage[value]],
            name=trace.storage_label(values.storage[value]),
        )
        for value in sorted(made)
    ]
    last = {values.storage[value]: value for value in sorted(made)}
    keep = [value for storage, value in last.items() if storages.death_op[storage] >= trace.op_count]
    return GraphFile(schema=SCHEMA, name=name, tensors=tensors, ops=ops, keep=keep)
