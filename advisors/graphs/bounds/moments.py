"""A lower bound on the overhead of any plan, from one moment of the iteration at a time.

When op k runs for the first time, everything that lives across it without a plan and is needed later is either on the device or
has to be made again (or brought back). So at least (bytes then - budget) of the tensors that k does not touch must be
absent; each absent tensor costs at least one more run of its maker, or its share of the link. The cheapest way
to be rid of that many bytes, taken fractionally, bounds what any plan pays; the bound is the largest over all k.
O(peak ops x live tensors x log).
"""

from __future__ import annotations

import math

import numpy as np

from memopt.advisors.graphs.graph import Graph, IntColumn
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import lifetimes, plain_memory

MOST_MOMENTS = 60
"""Each is a row for every tensor there: this bounds the program's size."""


def overhead_bound(problem: GraphProblem) -> float:
    """No plan under this budget has less overhead."""
    graph = problem.graph
    memory = plain_memory(graph)[:-1]
    over = memory - problem.budget_bytes
    moments = np.flatnonzero(over > 0)
    if not len(moments) or graph.plain_ms <= 0:
        return 0.0
    most = max(6, min(MOST_MOMENTS, 200_000 // max(1, graph.op_count)))
    order = np.argsort(-over[moments], kind="stable")[: most // 2]
    spread = np.linspace(0, len(moments) - 1, most // 2).astype(np.int64)
    chosen = sorted({*moments[order].tolist(), *moments[spread].tolist()})
    lives = lifetimes(graph)
    return max(_bound_at(problem, lives, op, int(over[op])) for op in chosen) / graph.plain_ms


def _bound_at(problem: GraphProblem, lives: tuple[IntColumn, IntColumn], op: int, excess: int) -> float:
    graph = problem.graph
    first, last = lives
    idle = (first >= 0) & (first < op) & (last > op) & (graph.tensor_bytes > 0)
    idle[list(graph.reads[op])] = False
    link_ms = 0.0
    if problem.may_swap:
        link_ms = float(graph.op_ms[:op].sum())
    by_op: dict[int, int] = {}
    for tensor in np.flatnonzero(idle).tolist():
        if graph.replayable[first[tensor]] and problem.may_recompute:
            by_op[int(first[tensor])] = by_op.get(int(first[tensor]), 0) + int(graph.tensor_bytes[tensor])
    if not problem.may_swap:
        return _cheapest(graph, by_op, excess)
    low, high = 0.0, max(graph.plain_ms, excess / (problem.out_gbps * 1e6))
    for _ in range(30):
        extra = (low + high) / 2
        rest = excess - int((link_ms + extra) * problem.out_gbps * 1e6)
        if rest > 0 and _cheapest(graph, by_op, rest) > extra:
            low = extra
        else:
            high = extra
    return low


def _cheapest(graph: Graph, by_op: dict[int, int], excess: int) -> float:
    """Fractional knapsack: least time to be rid of `excess` bytes; infinite when all together are fewer."""
    total = 0.0
    for op, size in sorted(by_op.items(), key=lambda item: float(graph.op_ms[item[0]]) / item[1]):
        ms = float(graph.op_ms[op])
        if size >= excess:
            return total + ms * excess / size
        total += ms
        excess -= size
    return math.inf
