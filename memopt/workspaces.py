"""What ops take beside their results while they run, as an iteration showed it: for shapes that it did not show."""

from __future__ import annotations

from collections import defaultdict

from memopt.trace import Trace

_LEAST_BYTES = 64 << 10
_TIMES = 4
"""As much as was seen at most is the most that the call which reads most is taken to need."""


def workspaces_of(trace: Trace) -> dict[str, float]:
    """Overload -> bytes of workspace to one that it reads, where it took most: small calls take what large ones do not (a copy of the weights).
    Of overloads that take little, none; nor of those most of whose larger calls take none (another kernel's came to light there)."""
    ops, sizes, storage_of = trace.ops, trace.storages.size_bytes, trace.values.storage
    names = {trace.op_name(op) for op, took in enumerate(ops.workspace_bytes) if took >= _LEAST_BYTES}
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for op, took in enumerate(ops.workspace_bytes):
        if (name := trace.op_name(op)) in names:
            read = sum(sizes[each] for each in {storage_of[value] for value in ops.reads.row(op)})
            calls[name].append((took, read))
    found = {}
    for name, each in calls.items():
        took, read = max(each)
        larger = [workspace for workspace, other in each if other >= read]
        if read and 2 * sum(workspace >= _LEAST_BYTES for workspace in larger) >= len(larger):
            most_read = max(other for _, other in each)
            found[name] = round(min(took / read, _TIMES * took / most_read), 3)
    return found
