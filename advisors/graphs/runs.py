"""A recompute plan as the plain sequence of runs, and what liveness makes of it.

Given the order of all runs, the best moments to free follow: a tensor is dropped after the last read before
its next production. So planners search over run sequences only; frees, peaks and steps are derived here.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from memopt.advisors.graphs.graph import Graph, IntColumn
from memopt.advisors.graphs.schedule import FREE, RUN, Step

Swap = tuple[int, int, bool]
"""Tensor; an op; whether the tensor leaves after the first run of that op, or else is back for it (`op_count`: the end)."""


def plain_runs(graph: Graph) -> list[int]:
    """Every op once, in order."""
    return list(range(graph.op_count))


def frees_after(graph: Graph, runs: list[int]) -> list[list[int]]:
    """For each run, the tensors that are of no use on the device after it."""
    wanted = graph.kept.tolist()
    reads, writes = graph.reads, graph.writes
    frees: list[list[int]] = [[] for _ in runs]
    for position in range(len(runs) - 1, -1, -1):
        op = runs[position]
        dying = frees[position]
        for tensor in writes[op]:
            if not wanted[tensor]:
                dying.append(tensor)
            wanted[tensor] = False
        for tensor in reads[op]:
            if not wanted[tensor]:
                dying.append(tensor)
                wanted[tensor] = True
    return frees


def steps_of_runs(graph: Graph, runs: list[int]) -> list[Step]:
    """The schedule of a run sequence without copies to the host."""
    steps: list[Step] = []
    for op, dying in zip(runs, frees_after(graph, runs), strict=True):
        steps.append((RUN, op))
        steps.extend((FREE, tensor) for tensor in dying)
    return steps


def memory_of_runs(graph: Graph, runs: list[int]) -> IntColumn:
    """Bytes on the device during each run, workspace included; then, last, bytes at the end."""
    memory, _, _ = memory_at(graph, runs, np.arange(len(runs)), len(runs))
    return memory


def memory_at(
    graph: Graph, runs: list[int], moments: IntColumn, end: int
) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Bytes on the device at the moments 0 to `end` when the runs happen at `moments` (ascending), workspaces included; the first
    moment at which each tensor is made (-1: never), and the last at which it is read, or else that one. In a few passes over whole columns."""
    made, made_at = _named(graph.writes, runs, moments)
    read, read_at = _named(graph.reads, runs, moments)
    kept = np.flatnonzero(graph.kept & ~graph.resident)
    tensors = np.concatenate([made, read, kept])
    at = np.concatenate([made_at, read_at, np.full(len(kept), end, dtype=np.int64)])
    order = np.lexsort((at, tensors))
    waits = (tensors[order[1:]] == tensors[order[:-1]]) & (order[1:] >= len(made))
    since, until = order[:-1][waits], order[1:][waits]
    change = np.zeros(end + 2, dtype=np.int64)
    change[0] = graph.resident_bytes
    for gone, come, size in (
        (at[until] + 1, at[since] + 1, graph.tensor_bytes[tensors[until]]),
        (made_at + 1, made_at, graph.tensor_bytes[made]),
    ):
        np.add.at(change, come, size)
        np.subtract.at(change, gone, size)
    memory: IntColumn = np.cumsum(change)[:-1]
    memory[moments] += graph.op_workspace_bytes[np.array(runs, dtype=np.int64)]
    first = np.full(graph.tensor_count, -1, dtype=np.int64)
    first[tensors[order[::-1]]] = at[order[::-1]]
    last = first.copy()
    reads = order[order >= len(made)]
    last[tensors[reads]] = at[reads]
    return memory, first, last


def _named(
    tensors_of: list[tuple[int, ...]], runs: list[int], moments: IntColumn
) -> tuple[IntColumn, IntColumn]:
    """All that `tensors_of` names for each run, and the moment of that run."""
    named = [tensors_of[op] for op in runs]
    found = np.fromiter(chain.from_iterable(named), dtype=np.int64)
    return found, np.repeat(moments, np.fromiter(map(len, named), np.int64, len(runs)))


def plain_memory(graph: Graph) -> IntColumn:
    """What `memory_of_runs` gives when every op runs once, in order; in a few passes over whole columns."""
    first, last = lifetimes(graph)
    memory = bytes_across(graph, first, last)
    made = first >= 0
    np.add.at(memory, first[made], graph.tensor_bytes[made])
    memory[:-1] += graph.op_workspace_bytes
    return memory


def bytes_across(graph: Graph, first: IntColumn, last: IntColumn) -> IntColumn:
    """Bytes on the device between each op and the one before it."""
    change = np.zeros(graph.op_count + 2, dtype=np.int64)
    crossing = (first >= 0) & (last > first)
    np.add.at(change, first[crossing] + 1, graph.tensor_bytes[crossing])
    np.add.at(change, last[crossing] + 1, -graph.tensor_bytes[crossing])
    found: IntColumn = np.cumsum(change)[: graph.op_count + 1] + graph.resident_bytes
    return found


def plain_peak(graph: Graph) -> int:
    """Largest bytes on the device when every op runs once, in order."""
    return int(plain_memory(graph).max())


def peak_of_runs(graph: Graph, runs: list[int]) -> int:
    """Largest bytes on the device at any moment of a run sequence."""
    return int(memory_of_runs(graph, runs).max())


def rerun_ms(graph: Graph, runs: list[int]) -> float:
    """Time of all runs beyond the first of each op."""
    counts = np.bincount(np.array(runs, dtype=np.int64), minlength=graph.op_count)
    return float(((counts - 1) * graph.op_ms).sum())


def floor_bytes(graph: Graph, *, swap: bool) -> tuple[int, int]:
    """Bytes below which no plan can go, and the op that sets them (-1: what is kept at the end).

    That is the largest working set of one op; without a link, also all that lives across it, is needed later and comes from an op
    that may run only once.
    """
    size: list[int] = graph.tensor_bytes.tolist()
    touched = [sum([size[t] for t in graph.reads[op] + graph.writes[op]]) for op in range(graph.op_count)]
    own = graph.resident_bytes + graph.op_workspace_bytes + np.array(touched, dtype=np.int64)
    once = ~graph.replayable
    if not swap and once.any():
        first, last = lifetimes(graph)
        held_long = np.flatnonzero((first >= 0) & once[first] & (last > first))
        stuck = np.zeros(graph.op_count + 2, dtype=np.int64)
        np.add.at(stuck, first[held_long] + 1, graph.tensor_bytes[held_long])
        np.add.at(stuck, np.minimum(last[held_long], graph.op_count), -graph.tensor_bytes[held_long])
        own += np.cumsum(stuck)[: graph.op_count]
        until = dict(zip(held_long.tolist(), last[held_long].tolist(), strict=True))
        for op, tensors in enumerate(graph.reads):
            for tensor in tensors:
                if until.get(tensor, 0) > op:
                    own[op] -= size[tensor]
    end = graph.resident_bytes + int(graph.tensor_bytes[graph.kept & ~graph.resident].sum())
    if not graph.op_count:
        return end, -1
    worst = int(np.argmax(own))
    return (end, -1) if end > own[worst] else (int(own[worst]), worst)


def lifetimes(graph: Graph) -> tuple[IntColumn, IntColumn]:
    """First op (producer) and last op that reads each tensor; `op_count` for kept ones."""
    last = graph.producer.copy()
    for op, tensors in enumerate(graph.reads):
        for tensor in tensors:
            last[tensor] = op
    last[graph.kept & ~graph.resident] = graph.op_count
    return graph.producer, last
