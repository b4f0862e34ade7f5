"""Checkmate's approximation for graphs that are too large for its integer program: its linear relaxation, rounded in two phases.

Rule (Jain et al., MLSys'20, section 5; `strategy_approx_lp.py`): solve the relaxation under (1 - e) of the budget, round S, what is
on the device at each stage's end, at a threshold, and let R, what runs, follow from S. What differs: stages end at some of the ops only
where there are so many that HiGHS would not solve the relaxation in time (`exact`, its program), several thresholds and e are
tried, and the cheapest valid plan is taken. Refused above `MOST_OPS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.exact import MOST_OPS, SLACK, Relaxed
from memopt.advisors.graphs.problem import Answer, GraphProblem, infeasible
from memopt.advisors.graphs.runs import peak_of_runs, plain_memory, plain_peak, rerun_ms, steps_of_runs
from memopt.errors import NotPossibleHere

THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9)
SHARES = (0.9, 0.8, 1.0, 0.7, 0.95, 0.6)
"""1 - e."""
SIZES = ((5_000, 10_000), (2_500, 20_000))
"""Most variables of a relaxation, which say how many stages there are: with few, what is made again is kept until its last use. The first
two are worth more, where time is short."""
LEAST_S = 0.3


def rounded(problem: GraphProblem) -> Answer:
    """The cheapest plan that meets the budget from the rounded relaxations."""
    graph = problem.graph
    if graph.op_count > MOST_OPS:
        raise NotPossibleHere(
            f"{graph.op_count} ops are too many for Checkmate's program",
            why="it has a variable for every pair of a stage and an op",
            try_="--strategy auto",
        )
    smallest = plain_peak(graph)
    bound_ms = 0.0
    best: tuple[float, list[int]] = (math.inf, [])
    for proved_ms, runs in rounded_plans(problem, problem.until):
        bound_ms = max(bound_ms, proved_ms)
        peak_bytes = peak_of_runs(graph, runs)
        smallest = min(smallest, peak_bytes)
        if peak_bytes <= problem.budget_bytes:
            best = min(best, (rerun_ms(graph, runs), runs))
    if not best[1]:
        raise infeasible(problem, max(smallest, problem.budget_bytes + 1))
    bound = max(0.0, (1 - SLACK) * bound_ms - SLACK) / max(graph.plain_ms, 1e-12)
    return Answer(steps=steps_of_runs(graph, best[1]), overhead_bound=bound)


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
