"""Linear and integer programs over runs and what is on the device, as `checkmate`, `exact` and `bound_with_copies` build them for HiGHS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopt.advisors.graphs.graph import Graph
from memopt.advisors.graphs.strategies.autotm import new_highs


@dataclass(slots=True)
class Program:
    """Rows and columns of the program, as they are added."""

    graph: Graph
    budget_bytes: int
    cost: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_start: list[int] = field(default_factory=lambda: [0])
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    runs: dict[tuple[int, int], int] = field(default_factory=dict)
    stored: dict[tuple[int, int], int] = field(default_factory=dict)

    def variable(self, cost: float, *, whole: bool, low: float = 0.0, most: float = 1.0) -> int:
        """A new column between `low` and `most`."""
        self.cost.append(cost)
        self.whole.append(whole)
        self.low.append(low)
        self.most.append(most)
        return len(self.cost) - 1

    def at_most(self, terms: dict[int, float], upper: float) -> None:
        """A new row."""
        self.column.extend(terms)
        self.value.extend(terms.values())
        self.row_start.append(len(self.column))
        self.row_upper.append(upper)


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


def new_program(program: Program, limit_s: float, *, whole: bool = True) -> Any:
    """A solver that holds the program; with `whole` False, its linear relaxation."""
    highs = new_highs(limit_s)
    import highspy

    lp = highspy.HighsLp()
    columns, rows = len(program.cost), len(program.row_upper)
    lp.num_col_, lp.num_row_ = columns, rows
    lp.col_cost_ = np.array(program.cost)
    lp.col_lower_, lp.col_upper_ = np.array(program.low), np.array(program.most)
    lp.row_lower_, lp.row_upper_ = np.full(rows, -np.inf), np.array(program.row_upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = columns, rows
    lp.a_matrix_.start_ = np.array(program.row_start, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(program.column, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(program.value)
    lp.integrality_ = [
        highspy.HighsVarType.kInteger if whole and each else highspy.HighsVarType.kContinuous
        for each in program.whole
    ]
    highs.passModel(lp)
    return highs
