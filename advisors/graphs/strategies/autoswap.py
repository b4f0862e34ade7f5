"""AutoSwap (Zhang et al., 2019, arXiv 1903.06631) on a plain graph.

Rule: candidates are tensors that are idle across the peak; pick by score until the budget holds: DOA (duration of absence), AOA (size x DOA),
WDOA (absence weighted by the load above the budget) and SWDOA (WDOA recomputed after each pick). Out in order of leaving, back just
in time on one FIFO lane. All four are tried, the cheapest wins. O(picks x candidates).
"""

from __future__ import annotations

import numpy as np

from memopt.advisors.graphs.executors.swap_executor import Trip, Walk, best_walk, idle_trips, just_in_time
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs

SCORES = ("doa", "aoa", "wdoa", "swdoa")


def autoswap(problem: GraphProblem) -> Answer:
    """AutoSwap (2019): idle tensors across the peak by absence, area and load above the budget."""
    runs = plain_runs(problem.graph)
    if not problem.may_swap:
        return best_walk(problem, [], [])
    return best_walk(problem, [(runs, pick(problem, runs, score)) for score in SCORES], [just_in_time])


def pick(problem: GraphProblem, runs: list[int], score: str) -> list[Trip]:
    """Trips in order of their score until the budget holds."""
    candidates = idle_trips(
        problem.graph, runs, least_bytes=max(1, int(problem.graph.tensor_bytes.max(initial=0)) // 1000)
    )
    walk = Walk(problem, runs, [])
    memory = walk.memory
    chosen: list[Trip] = []

    def value(trip: Trip, load: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        absence = float(walk.clock[trip.need] - walk.clock[trip.leave + 1])
        if score == "doa":
            return absence
        if score == "aoa":
            return absence * walk.size[trip.tensor]
        return float(load[trip.need] - load[trip.leave + 1]) * walk.size[trip.tensor]

    def load_above() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        over = np.maximum(memory[:-1] - problem.budget_bytes, 0) * np.diff(walk.clock)
        return np.concatenate(([0.0], np.cumsum(over)))

    load = load_above()
    order = sorted(candidates, key=lambda trip: -value(trip, load))
    while order and int(memory.max()) > problem.budget_bytes:
        if score == "swdoa":
            load = load_above()
            best = max(range(len(order)), key=lambda index: value(order[index], load))
            trip = order.pop(best)
        else:
            trip = order.pop(0)
        over = memory[trip.leave + 1 : trip.need] > problem.budget_bytes
        if over.any():
            memory[trip.leave + 1 : trip.need] -= walk.size[trip.tensor]
            chosen.append(trip)
    return chosen
