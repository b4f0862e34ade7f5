"""Linear and integer programs over runs and what is on the device, as `checkmate`, `exact` and `bound_with_copies` build them for HiGHS."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.advisors.graphs.graph import Graph
from memopt.advisors.program import Program


@dataclass(slots=True, kw_only=True)
class RunProgram(Program):
    """A program of a graph: which columns are runs of an op and which are stored tensors, by (stage, number)."""

    graph: Graph
    budget_bytes: int
    runs: dict[tuple[int, int], int] = field(default_factory=dict)
    stored: dict[tuple[int, int], int] = field(default_factory=dict)


def last_service(graph: Graph, end: int | None = None) -> list[int]:
    """Latest stage in which a run of each op can serve anything; `end` for what is kept (the last stage)."""
    end = graph.op_count - 1 if end is None else end
    latest = list(range(graph.op_count))
    readers: list[list[int]] = [[] for _ in range(graph.tensor_count)]
    for op, tensors in enumerate(graph.reads):
        for tensor in tensors:
            readers[tensor].append(op)
    kept = (graph.kept & ~graph.resident).tolist()
    for op in range(graph.op_count - 1, -1, -1):
        for tensor in graph.writes[op]:
            if kept[tensor]:
                latest[op] = end
            latest[op] = max([latest[op], *(latest[reader] for reader in readers[tensor])])
    return latest
