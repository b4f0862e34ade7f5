"""`auto` for graphs: portfolio, then exact-delta large-neighbourhood search, anytime.

1. Every online rule gives a start (first valid plan in milliseconds); each start is polished: reruns that the budget does not need go.
2. `graph_search` improves the best ones until the time is up, or until the lower bound is met. Ctrl-C keeps the best.
It is not optimal in general: `overhead_bound` says how far off it can be at most.
"""

from __future__ import annotations

import time

from memopt.advisors.graph_bounds import overhead_bound
from memopt.advisors.graph_engine import Engine, Stuck
from memopt.advisors.graph_problem import Answer, GraphProblem, infeasible, plain_answer
from memopt.advisors.graph_runs import peak_of_runs, plain_runs, rerun_ms, steps_of_runs
from memopt.advisors.graph_scores import SCORES
from memopt.advisors.graph_search import Search

PORTFOLIO = ("msps", "dtr-local", "next-use", "dtr", "dtr-eqclass", "size", "lru", "megengine", "belady")


def auto(problem: GraphProblem) -> Answer:
    """The best plan found by `problem.until`."""
    plain = plain_answer(problem)
    if plain is not None:
        return plain
    bound = overhead_bound(problem)
    starts = portfolio(problem)
    search = Search(problem.graph, starts[0][1], problem.budget_bytes)
    stats: dict[str, float | int | str] = {"start": starts[0][2], "start_overhead": starts[0][0] / max(problem.graph.plain_ms, 1e-12)}
    try:
        if search.best_over:
            search.recreate(float("inf"), set())
            search.keep_if_best()
        for _, runs, _ in starts[1:3]:
            search.load(runs)
            search.polish_all()
        search.load(search.best_runs)
        search.run(problem.until)
    except KeyboardInterrupt:
        stats["interrupted"] = 1
    stats["iterations"] = search.iterations
    if search.best_over:
        raise infeasible(problem, peak_of_runs(problem.graph, search.best_runs))
    return Answer(steps=steps_of_runs(problem.graph, search.best_runs), overhead_bound=bound, stats=stats)


def portfolio(problem: GraphProblem) -> list[tuple[float, list[int], str]]:
    """Run sequences of the online rules that meet the budget, cheapest first; the plain one when none does."""
    found: list[tuple[float, list[int], str]] = []
    begin = time.monotonic()
    share = 0.3 * (problem.until - begin)
    for name in PORTFOLIO:
        if time.monotonic() - begin > share and found:
            break
        try:
            runs = Engine(problem.graph, problem.budget_bytes, SCORES[name]()).plan()
        except Stuck:
            continue
        found.append((rerun_ms(problem.graph, runs), runs, name))
    return sorted(found, key=lambda item: item[0]) or [(float("inf"), plain_runs(problem.graph), "plain")]
