"""Checkmate's approximation for graphs that are too large for its integer program: its linear relaxation, rounded in two phases.

Rule (Jain et al., MLSys'20, section 5; `strategy_approx_lp.py`): solve the relaxation under (1 - e) of the budget, round S, what is
on the device at each stage's end, at a threshold, and let R, what runs, follow from S. What differs: stages end at some of the ops only
where there are so many that HiGHS would not solve the relaxation in time (`exact`, its program), several thresholds and e are
tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.exact import Relaxed
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import plain_memory

THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9)
SHARES = (0.9, 0.8, 1.0, 0.7, 0.95, 0.6)
"""1 - e."""
SIZES = ((5_000, 10_000), (2_500, 20_000))
"""Most variables of a relaxation, which say how many stages there are: with few, what is made again is kept until its last use. The first
two are worth more, where time is short."""
LEAST_S = 0.3


def rounded_plans(problem: GraphProblem, until: float) -> Iterator[tuple[float, list[int]]]:
    """Time (ms) that any plan needs at least, as far as known, and a run sequence; those that are soon found first."""
    seen: set[int] = set()
    for sizes in SIZES:
        choices = {len(stages): stages for stages in (stages_of(problem, size) for size in sizes)}
        fresh = [stages for count, stages in choices.items() if count not in seen]
        for number, (share, stages) in enumerate(itertools.product(SHARES, fresh)):
            left_s = until - now()
            if left_s < 0 and (number or seen):
                return
            relaxed = Relaxed(replace(problem, budget_bytes=int(share * problem.budget_bytes)), stages)
            solved = relaxed.relaxation(max(LEAST_S, left_s))
            if solved is None:
                continue
            proved_ms = float(solved.getInfo().objective_function_value) if share == 1.0 else 0.0
            values = solved.getSolution().col_value
            for threshold in THRESHOLDS:
                yield proved_ms, relaxed.start(values, threshold)[0]
        seen.update(choices)


def stages_of(problem: GraphProblem, most_variables: int) -> list[int]:
    """The ops at which stages end: all, or evenly as many as there are variables for among those where memory is short without a plan."""
    graph = problem.graph
    ops = np.arange(graph.op_count)
    if Relaxed(problem, ops.tolist()).size() > most_variables:
        ops = np.flatnonzero(plain_memory(graph)[:-1] > problem.budget_bytes)
    while len(ops) > 1 and Relaxed(problem, ops.tolist()).size() > most_variables:
        ops = ops[::2]
    found: list[int] = ops.tolist()
    return found
