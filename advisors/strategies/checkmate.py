"""Checkmate (Jain et al., MLSys 2020, arXiv 1910.02653): the cheapest recomputation by integer programming.

Rule: R says which ops run in which stage, S which tensors are kept from stage to stage; minimise the time of all runs with the
memory of every moment within the budget. Above some size: solve the linear relaxation, round S, and let R follow from S. Needs HiGHS.
On profiles the enforcer lets a tensor go once, makes it again when it is first asked for and then keeps it, so S is one variable a
tensor, and R follows from it by the simulator, which judges every answer (`lower_bound`, `tightening`). One binary a choice.
On graphs it is the paper's program (`bounds/stages`), started from a plan of the greedy search, exact when HiGHS closes the gap; above
`MOST_OPS` its relaxation, rounded (`bounds/rounding`). Both are exponential in the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.exact import MOST_OPS as MOST_ROUNDED
from memopt.advisors.graphs.bounds.exact import SLACK
from memopt.advisors.graphs.bounds.rounding import rounded_plans
from memopt.advisors.graphs.bounds.stages import build, solve
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import peak_of_runs, plain_peak, plain_runs, rerun_ms, steps_of_runs
from memopt.advisors.graphs.search.neighbourhood import Search
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.profiles.starts.tightening import answers
from memopt.advisors.registry import RECOMPUTES, REPLAYABLE, strategy
from memopt.errors import NotPossibleHere
from memopt.estimators.simulator.decision import RECOMPUTE

MOST_OPS = 100
"""Above, HiGHS does not get beyond its start in a minute."""

checkmate = strategy(
    "checkmate",
    paper="Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
    needs=f"{REPLAYABLE}; HiGHS (memopt[exact])",
    allows=RECOMPUTES,
)


@checkmate.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """The program's answers; at last everything made again."""
    yield from answers(problem, RECOMPUTES)
    yield {s: RECOMPUTE for s, c in problem.candidates.items() if c.chain is not None}


@checkmate.graphs
def on_graph(problem: GraphProblem) -> Answer:
    """Checkmate (MLSys'20): the optimal recomputation by integer programming, from 100 ops on its relaxation rounded (needs highspy)."""
    graph = problem.graph
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
        raise problem.not_below(max(problem.budget_bytes + 1, peak_of_runs(graph, search.best_runs)))
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
        raise problem.not_below(max(smallest, problem.budget_bytes + 1))
    bound = max(0.0, (1 - SLACK) * bound_ms - SLACK) / max(graph.plain_ms, 1e-12)
    return Answer(steps=steps_of_runs(graph, best[1]), overhead_bound=bound)
