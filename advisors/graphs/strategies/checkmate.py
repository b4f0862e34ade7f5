"""Checkmate (Jain et al., MLSys'20) on a plain graph: the integer program, on HiGHS.

Stage t ends with the first run of op t. R[t,i]: op i runs in stage t. S[t,v]: tensor v is on the device when stage t starts.
F[t,k,v]: v is freed after k in stage t. Minimise the time of all R with i < t, with memory after every possible run within the budget.
What differs: storages and ops are told apart (an op may write several), runs that cannot serve anything any more have no variable, and the program
starts from a plan of the greedy search. Exact when HiGHS closes the gap; the dual bound is reported. O(ops^2 x degree) rows: above `MOST_OPS`
the paper's approximation takes its place (`rounding`). Within a stage each op runs at most once, as in the paper. Needs `highspy`.
"""

from __future__ import annotations

import math

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.exact import MOST_OPS as MOST_ROUNDED
from memopt.advisors.graphs.bounds.exact import SLACK
from memopt.advisors.graphs.bounds.rounding import rounded_plans
from memopt.advisors.graphs.bounds.stages import build, solve
from memopt.advisors.graphs.problem import Answer, GraphProblem, infeasible, plain_answer
from memopt.advisors.graphs.runs import peak_of_runs, plain_peak, plain_runs, rerun_ms, steps_of_runs
from memopt.advisors.graphs.search.neighbourhood import Search
from memopt.errors import NotPossibleHere

MOST_OPS = 100
"""Above, HiGHS does not get beyond its start in a minute."""


def checkmate(problem: GraphProblem) -> Answer:
    """Checkmate (MLSys'20): the optimal recomputation by integer programming, from 100 ops on its relaxation rounded (needs highspy)."""
    plain = plain_answer(problem)
    if plain is not None:
        return plain
    graph = problem.graph
    if not problem.may_recompute:
        raise infeasible(problem, plain_peak(graph))
    if graph.op_count > MOST_OPS:
        return rounded(problem)
    program = build(graph, problem.budget_bytes)
    search = Search(graph, plain_runs(graph), problem.budget_bytes)
    begin = now()
    search.greedy(0.0, 0.5, problem.until)
    search.load_best()
    search.run(begin + 0.2 * (problem.until - begin))
    runs, bound = solve(problem, program, search.best_runs if not search.best_over else None)
    if runs is None:
        raise infeasible(problem, max(problem.budget_bytes + 1, peak_of_runs(graph, search.best_runs)))
    return Answer(
        steps=steps_of_runs(graph, runs),
        overhead_bound=bound / max(graph.plain_ms, 1e-12),
        stats={"bound_ms": bound},
    )


def rounded(problem: GraphProblem) -> Answer:
    """The cheapest plan that meets the budget from the rounded relaxations."""
    graph = problem.graph
    if graph.op_count > MOST_ROUNDED:
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
