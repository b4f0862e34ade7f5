"""Sublinear memory cost (Chen et al. 2016) on a plain graph: keep what crosses chosen cuts of the forward pass, recompute the rest.

Rules: `sqrt`, a cut after every k-th op with k = sqrt(n);
`greedy`, a cut where the bytes accumulated since the last cut pass b, for a sweep of b (the best that meets the budget wins).
What differs: cuts are moved to the nearest narrow place (`segments`). O(edges) per plan, some dozens of plans.
"""

from __future__ import annotations

from memopt.advisors.graphs.executors.segments import Forward, greedy_cuts, runs_keeping, sqrt_cuts
from memopt.advisors.graphs.problem import Answer, GraphProblem, cheapest_runs


def sublinear_sqrt(problem: GraphProblem) -> Answer:
    """Chen's sqrt(n) rule."""
    forward = Forward(problem.graph)
    return cheapest_runs(problem, (runs_keeping(forward, keep) for keep in sqrt_cuts(forward)))


def sublinear_greedy(problem: GraphProblem) -> Answer:
    """Chen's greedy segments, best of a sweep."""
    forward = Forward(problem.graph)
    return cheapest_runs(problem, (runs_keeping(forward, keep) for keep in greedy_cuts(forward)))
