"""The strategies that are an eviction engine plus a score, as `Strategy` functions.

Papers: DTR (Kirisame et al., ICLR'21: h_DTR, EqClass, Local, and the ablations MSPS, LRU, size); MegEngine's DTR;
Belady's furthest next use (SwapAdvisor's eviction rule, here with recomputation). See `graph_engine` for what is the same
and what differs. O(evictions x tensors on the device) NumPy work per plan.
"""

from __future__ import annotations

from memopt.advisors.graph_engine import Engine, Stuck
from memopt.advisors.graph_problem import Answer, GraphProblem, Strategy, infeasible, plain_answer
from memopt.advisors.graph_runs import peak_of_runs, plain_runs, steps_of_runs
from memopt.advisors.graph_scores import SCORES, PlainScore


def online(score: type[PlainScore]) -> Strategy:
    """The strategy that evicts by `score`."""

    def strategy(problem: GraphProblem) -> Answer:
        plain = plain_answer(problem)
        if plain is not None:
            return plain
        if not problem.may_recompute:
            raise infeasible(problem, peak_of_runs(problem.graph, plain_runs(problem.graph)))
        try:
            runs = Engine(problem.graph, problem.budget_bytes, score()).plan()
        except Stuck:
            raise infeasible(problem, smallest_peak(problem, score)) from None
        return Answer(steps=steps_of_runs(problem.graph, runs))

    return strategy


def smallest_peak(problem: GraphProblem, score: type[PlainScore], probes: int = 6) -> int:
    """Smallest peak that the rule reaches, by bisection of the budget."""
    graph = problem.graph
    best = high = peak_of_runs(graph, plain_runs(graph))
    low = problem.budget_bytes
    for _ in range(probes):
        middle = (low + high) // 2
        try:
            best = min(best, peak_of_runs(graph, Engine(graph, middle, score()).plan()))
            high = middle
        except Stuck:
            low = middle
    return best


ONLINE: dict[str, Strategy] = {name: online(score) for name, score in SCORES.items()}
