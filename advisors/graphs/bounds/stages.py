"""Checkmate's integer program of a plain graph (Jain et al., MLSys'20), for HiGHS.

Stage t ends with the first run of op t. R[t,i]: op i runs in stage t. S[t,v]: tensor v is on the device when stage t starts.
F[t,k,v]: v is freed after k in stage t. Minimise the time of all R with i < t, with memory after every possible run within the budget.
Storages and ops are told apart (an op may write several), runs that cannot serve anything any more have no variable. Within a stage each
op runs at most once, as in the paper. O(ops^2 x degree) rows.
"""

from __future__ import annotations

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.program import RunProgram, last_service
from memopt.advisors.graphs.graph import Graph
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import peak_of_runs


def build(graph: Graph, budget_bytes: int) -> RunProgram:
    """The program."""
    count = graph.op_count
    program = RunProgram(graph=graph, budget_bytes=budget_bytes)
    latest = last_service(graph)
    for stage in range(count):
        for op in range(stage + 1):
            if op == stage or (graph.replayable[op] and latest[op] >= stage):
                program.runs[stage, op] = program.column(
                    0.0 if op == stage else float(graph.op_ms[op]), whole=True, least=float(op == stage)
                )
    for stage in range(1, count + 1):
        for tensor in np.flatnonzero((graph.producer >= 0) & (graph.producer < stage)).tolist():
            maker = int(graph.producer[tensor])
            must = stage == count and graph.kept[tensor]
            if must or (stage < count and latest[maker] >= stage):
                program.stored[stage, tensor] = program.column(0.0, whole=True, least=float(must))
    for stage in range(count):
        _flow(program, stage)
        _memory(program, stage)
    return program


def _flow(program: RunProgram, stage: int) -> None:
    """What runs has its reads; what is stored came from somewhere."""
    graph = program.graph
    for op in range(stage + 1):
        run = program.runs.get((stage, op))
        for tensor in graph.reads[op] if run is not None else ():
            assert run is not None
            terms = {run: 1.0}
            _add(terms, program.stored.get((stage, tensor)), -1.0)
            _add(terms, program.runs.get((stage, int(graph.producer[tensor]))), -1.0)
            program.row(terms, high=0.0)
    for tensor in np.flatnonzero((graph.producer >= 0) & (graph.producer <= stage)).tolist():
        after = program.stored.get((stage + 1, tensor))
        if after is not None:
            terms = {after: 1.0}
            _add(terms, program.stored.get((stage, tensor)), -1.0)
            _add(terms, program.runs.get((stage, int(graph.producer[tensor]))), -1.0)
            program.row(terms, high=0.0)


def _memory(program: RunProgram, stage: int) -> None:
    """Bytes during every possible run of the stage, in units of the budget."""
    graph = program.graph
    unit = float(max(1, program.budget_bytes))
    used: dict[int, float] = {}
    for tensor in np.flatnonzero((graph.producer >= 0) & (graph.producer < stage)).tolist():
        _add(used, program.stored.get((stage, tensor)), float(graph.tensor_bytes[tensor]) / unit)
    readers: dict[int, list[int]] = {}
    for op in range(stage + 1):
        for tensor in graph.reads[op] if (stage, op) in program.runs else ():
            readers.setdefault(tensor, []).append(op)
    room = 1.0 - graph.resident_bytes / unit
    for op in range(stage + 1):
        run = program.runs.get((stage, op))
        if run is None:
            continue
        for tensor in graph.writes[op]:
            _add(used, run, float(graph.tensor_bytes[tensor]) / unit)
        row = dict(used)
        _add(row, run, float(graph.op_workspace_bytes[op]) / unit)
        program.row(row, high=room)
        for tensor in graph.reads[op] + graph.writes[op]:
            if graph.tensor_bytes[tensor] and not (stage in readers.get(tensor, ()) and op < stage):
                used[_free(program, stage, tensor, op, run, readers)] = (
                    -float(graph.tensor_bytes[tensor]) / unit
                )


def _free(
    program: RunProgram, stage: int, tensor: int, op: int, run: int, readers: dict[int, list[int]]
) -> int:
    free = program.column(0.0, whole=False)
    program.row({free: 1.0, run: -1.0}, high=0.0)
    after = program.stored.get((stage + 1, tensor))
    if after is not None:
        program.row({free: 1.0, after: 1.0}, high=1.0)
    for reader in readers.get(tensor, ()):
        if reader > op:
            program.row({free: 1.0, program.runs[stage, reader]: 1.0}, high=1.0)
    return free


def _add(terms: dict[int, float], variable: int | None, amount: float) -> None:
    if variable is not None:
        terms[variable] = terms.get(variable, 0.0) + amount


def solve(
    problem: GraphProblem, program: RunProgram, start: list[int] | None
) -> tuple[list[int] | None, float]:
    """Runs and the lower bound on their rerun time."""
    highs = program.solver(max(0.5, problem.until - now()))
    if start is not None:
        _warm_start(highs, program, start)
    highs.run()
    info = highs.getInfo()
    bound = max(0.0, float(info.mip_dual_bound)) if np.isfinite(info.mip_dual_bound) else 0.0
    if info.primal_solution_status != 2:
        return start, bound
    values = highs.getSolution().col_value
    runs: list[int] = []
    for stage in range(program.graph.op_count):
        runs.extend(
            op
            for op in range(stage)
            if (index := program.runs.get((stage, op))) is not None and values[index] > 0.5
        )
        runs.append(stage)
    if peak_of_runs(program.graph, runs) > problem.budget_bytes:
        return start, bound
    return runs, bound


def _warm_start(highs: object, program: RunProgram, runs: list[int]) -> None:
    """Give HiGHS the runs (it completes the other variables), where the program can say them."""
    import highspy

    stage_runs: dict[int, set[int]] = {}
    stage = 0
    for op in runs:
        stage_runs.setdefault(stage, set()).add(op)
        stage += op == stage
    indices: list[int] = []
    values: list[float] = []
    for (stage, op), index in program.runs.items():
        indices.append(index)
        values.append(float(op in stage_runs.get(stage, ())))
    assert isinstance(highs, highspy.Highs)
    highs.setSolution(len(indices), np.array(indices, dtype=np.int32), np.array(values))
