"""The strategies that are an eviction engine plus a score, as `Strategy` functions.

Papers: DTR (Kirisame et al., ICLR'21: h_DTR, EqClass, Local, and the ablations MSPS, LRU, size); MegEngine's DTR;
Belady's furthest next use (SwapAdvisor's eviction rule, here with recomputation). See `engine` for what is the same
and what differs. O(evictions x tensors on the device) NumPy work per plan.
"""

from __future__ import annotations

from memopt.advisors.graphs.executors.engine import Engine, Stuck
from memopt.advisors.graphs.executors.scores import SCORES, PlainScore
from memopt.advisors.graphs.problem import Answer, GraphProblem, Strategy, infeasible, plain_answer
from memopt.advisors.graphs.runs import peak_of_runs, plain_peak, plain_runs, steps_of_runs

WORDS = {
    "dtr": "h_DTR (Kirisame et al., ICLR'21): cost with evicted neighbourhood over bytes and staleness",
    "dtr-eqclass": "h_DTR with the neighbourhood approximated by union-find classes",
    "dtr-local": "h_DTR without the neighbourhood",
    "msps": "memory saved per second of recomputation (Capuchin's rule, online)",
    "lru": "least recently used first",
    "size": "largest first",
    "belady": "furthest next use first",
    "dtr-megengine": "MegEngine's DTR score, in bytes touched instead of time, without addresses",
    "next-use": "memory saved per second over the distance to the next use (known beforehand)",
}


def online(name: str, score: type[PlainScore]) -> Strategy:
    """The strategy that evicts by `score`."""

    def strategy(problem: GraphProblem) -> Answer:
        plain = plain_answer(problem)
        if plain is not None:
            return plain
        if not problem.may_recompute:
            raise infeasible(problem, plain_peak(problem.graph))
        try:
            runs = Engine(problem.graph, problem.budget_bytes, score()).plan()
        except Stuck:
            peak, runs = smallest_peak(problem, score)
            if peak > problem.budget_bytes:
                raise infeasible(problem, peak) from None
        return Answer(steps=steps_of_runs(problem.graph, runs))

    strategy.__doc__ = f"{WORDS[name]}."
    return strategy


def smallest_peak(problem: GraphProblem, score: type[PlainScore], probes: int = 6) -> tuple[int, list[int]]:
    """Smallest peak that the rule reaches, by bisection of the budget, and its runs (the rules are not monotone)."""
    graph = problem.graph
    best = plain_runs(graph)
    peak = high = peak_of_runs(graph, best)
    low = problem.budget_bytes
    for _ in range(probes):
        middle = (low + high) // 2
        try:
            runs = Engine(graph, middle, score()).plan()
        except Stuck:
            low = middle
            continue
        high = middle
        if peak_of_runs(graph, runs) < peak:
            best, peak = runs, peak_of_runs(graph, runs)
    return peak, best


ONLINE: dict[str, Strategy] = {name: online(name, score) for name, score in SCORES.items()}
