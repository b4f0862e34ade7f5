"""A recompute plan as the plain sequence of runs, and what liveness makes of it.

Given the order of all runs, the best moments to free follow: a tensor is dropped after the last read before
its next production. So planners search over run sequences only; frees, peaks and steps are derived here.
"""

from __future__ import annotations

import numpy as np

from memopt.advisors.graphs.graph import Graph, IntColumn
from memopt.advisors.schedule import FREE, RUN, Step


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
    size = graph.tensor_bytes.tolist()
    change = np.zeros(len(runs) + 1, dtype=np.int64)
    for position, (op, dying) in enumerate(zip(runs, frees_after(graph, runs), strict=True)):
        change[position] += sum(size[tensor] for tensor in graph.writes[op])
        change[position + 1] -= sum(size[tensor] for tensor in dying)
    memory = np.cumsum(change) + graph.resident_bytes
    memory[:-1] += graph.op_workspace_bytes[np.array(runs, dtype=np.int64)]
    return memory


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
