"""What ops take beside their results while they run, as an iteration showed it; for shapes that it did not show, as like calls did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median_high

from memopt.trace import Trace

Calls = Sequence[tuple[int, int]]
"""(bytes that a call reads and gives, bytes of its workspace), ascending, each of the former once."""

ON_A_CPU: Mapping[str, Calls] = {
    "aten.convolution.default": [(1000, 1000)],
    "aten.convolution_backward.default": [(1000, 1000)],
    "aten.native_batch_norm_backward.default": [(1000, 400)],
    "aten.native_layer_norm_backward.default": [(1000, 600)],
    "aten.mkldnn_rnn_layer.default": [(1000, 350)],
    "aten.mkldnn_rnn_layer_backward.default": [(1000, 350)],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": [(1000, 150)],
}
"""About what kernels of torch 2.13 take there (oneDNN's copies in layouts of its own, for the most part), as profiles of some fifty scripts
had it: before there is one of this script."""

_LEAST_BYTES = 64 << 10
_MOST_CALLS = 16
_SAME = 0.02
_LIKE = 2
"""Times as many bytes, or as few, are a like call's."""


def workspaces_of(trace: Trace) -> dict[str, list[tuple[int, int]]]:
    """The `Calls` of the overloads that take much, as far as these are their largest; where calls differ that read and give as much, what
    most of them take: what one took alone came to light there, and is another kernel's."""
    ops, sizes, storage_of = trace.ops, trace.storages.size_bytes, trace.values.storage
    names = {trace.op_name(op) for op, took in enumerate(ops.workspace_bytes) if took >= _LEAST_BYTES}
    calls: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for op, took in enumerate(ops.workspace_bytes):
        if (name := trace.op_name(op)) in names:
            read = sum(sizes[each] for each in {storage_of[value] for value in ops.reads.row(op)})
            calls[name][read + ops.extra_bytes[op] - took].append(took)
    found = {}
    for name, each in calls.items():
        largest = sorted((touched, median_high(took)) for touched, took in each.items() if touched)[-_MOST_CALLS:]  # fmt: skip
        if any(took >= _LEAST_BYTES for _, took in largest):
            found[name] = largest
    return found


def workspace_bytes(calls: Calls, touched: int) -> int:
    """What a call takes that reads and gives `touched` bytes: what one took that did as much, else as much to each byte as that like call which
    took most, or the nearest one, where none is like it."""
    if not touched:
        return 0
    same = max((took for each, took in calls if abs(each - touched) <= _SAME * touched), default=-1)
    if same >= 0:
        return same
    like = [took / each for each, took in calls if touched <= _LIKE * each and each <= _LIKE * touched]
    if not like:
        each, took = min(calls, key=lambda call: max(call[0] / touched, touched / max(1, call[0])))
        return int(touched * took / max(1, each))
    return int(touched * max(like))
