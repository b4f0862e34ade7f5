"""What ops take beside their results while they run, as an iteration showed it: for shapes that it did not show."""

from __future__ import annotations

from collections import defaultdict

from memopt.trace import Trace

_LEAST_BYTES = 64 << 10
_TIMES = 4
"""As much as was seen at most is the most that the call which touches most is taken to need."""


def workspaces_of(trace: Trace) -> dict[str, float]:
    """Overload -> bytes of workspace to one that it reads or gives (a copy of either, laid out as the kernel wants it), where it took most: small
    calls take what large ones do not (a copy of the weights). Of overloads that take little, none; nor of those most of whose larger calls
    take none (another kernel's came to light there)."""
    ops, sizes, storage_of = trace.ops, trace.storages.size_bytes, trace.values.storage
    names = {trace.op_name(op) for op, took in enumerate(ops.workspace_bytes) if took >= _LEAST_BYTES}
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for op, took in enumerate(ops.workspace_bytes):
        if (name := trace.op_name(op)) in names:
            read = sum(sizes[each] for each in {storage_of[value] for value in ops.reads.row(op)})
            calls[name].append((took, read + ops.extra_bytes[op] - took))
    found = {}
    for name, each in calls.items():
        took, touched = max(each)
        larger = [workspace for workspace, other in each if other >= touched]
        if touched and 2 * sum(workspace >= _LEAST_BYTES for workspace in larger) >= len(larger):
            most = max(other for _, other in each)
            found[name] = round(min(took / touched, _TIMES * took / most), 3)
    return found
