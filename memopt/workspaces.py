"""What ops take beside their results while they run, as an iteration showed it: for shapes that it did not show."""

from __future__ import annotations

from memopt.trace import Trace

_LEAST_BYTES = 64 << 10


def workspaces_of(trace: Trace) -> dict[str, float]:
    """Overload -> bytes of workspace to one that it reads, where it took most: small calls take what large ones do not (a copy of the weights).
    Of ops that take little, none."""
    ops, sizes, storage_of = trace.ops, trace.storages.size_bytes, trace.values.storage
    most: dict[str, int] = {}
    for op in sorted(range(trace.op_count), key=ops.workspace_bytes.__getitem__):
        if ops.workspace_bytes[op] >= _LEAST_BYTES:
            most[trace.op_name(op)] = op
    found = {}
    for name, op in most.items():
        read = sum(sizes[each] for each in {storage_of[value] for value in ops.reads.row(op)})
        if read:
            found[name] = round(ops.workspace_bytes[op] / read, 3)
    return found
