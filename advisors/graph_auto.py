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
from memopt.advisors.graph_runs import peak_of_runs, rerun_ms, steps_of_runs
from memopt.advisors.graph_scores import SCORES
from memopt.advisors.graph_search import Search
from memopt.advisors.graph_segments import Forward, greedy_cuts, runs_keeping, sqrt_cuts

PORTFOLIO = ("msps", "dtr-local", "next-use", "dtr", "dtr-eqclass", "size", "lru", "megengine", "belady")

GREEDY = ((0.0, 0.5), (0.0, 1.0), (0.0, 0.0), *((0.3, 0.5), (0.3, 1.0), (0.15, 0.5), (0.15, 1.0)) * 4)
"""Noise and breadth of the greedy starts."""


def auto(problem: GraphProblem) -> Answer:
    """The best plan found by `problem.until`."""
    plain = plain_answer(problem)
    if plain is not None:
        return plain
    bound = overhead_bound(problem)
    starts = portfolio(problem)
    search = Search(problem.graph, starts[0][1], problem.budget_bytes)
    stats: dict[str, float | int | str] = {"start": starts[0][2], "start_ms": starts[0][0]}
    try:
        spent = 0.3 * (problem.until - time.monotonic())
        pause = time.monotonic() + spent
        for noise, breadth in GREEDY:
            search.greedy(noise, breadth, problem.until)
            if time.monotonic() > pause:
                break
        for _, runs, _ in starts[:3]:
            search.load(runs)
            search.repair(problem.until)
            search.polish_all()
        stats["first_ms"] = search.best_cost
        search.load(search.best_runs)
        search.run(problem.until)
    except KeyboardInterrupt:
        stats["interrupted"] = 1
    stats["iterations"] = search.iterations
    if search.best_over:
        raise infeasible(problem, peak_of_runs(problem.graph, search.best_runs))
    return Answer(steps=steps_of_runs(problem.graph, search.best_runs), overhead_bound=bound, stats=stats)


def portfolio(problem: GraphProblem) -> list[tuple[float, list[int], str]]:
    """Run sequences to start from: those that meet the budget, cheapest first; else those that exceed it least."""
    graph = problem.graph
    found: list[tuple[int, float, list[int], str]] = []
    begin = time.monotonic()
    share = 0.2 * (problem.until - begin)

    def note(runs: list[int], name: str) -> None:
        over = max(0, peak_of_runs(graph, runs) - problem.budget_bytes)
        found.append((over, rerun_ms(graph, runs), runs, name))

    forward = Forward(graph)
    for keep in sqrt_cuts(forward) + greedy_cuts(forward):
        note(runs_keeping(forward, keep), "segments")
        if time.monotonic() - begin > share / 2:
            break
    for name in PORTFOLIO:
        if time.monotonic() - begin > share:
            break
        try:
            note(Engine(graph, problem.budget_bytes, SCORES[name](), until=begin + share).plan(), name)
        except Stuck:
            continue
    found.sort(key=lambda item: item[:2])
    return [(cost, runs, name) for _, cost, runs, name in found]
