"""SuperNeurons (Wang et al., PPoPP'18) on a plain graph.

Rule: liveness; the outputs of convolutions (here: of the dearest ops, since a graph need not have any) are checkpoints, everything between
them is recomputed; checkpoints are copied out, oldest first (the LRU tensor cache), only when memory is short. A segment whose bytes are
within the largest backward working set is recomputed once and kept (speed-centric), which is what `runs_keeping` does; the
memory-centric replay per use is not modelled. O(edges) per tried number of checkpoints.
"""

from __future__ import annotations

from memopt.advisors.graphs.executors.segments import Forward, checkpoints, runs_keeping
from memopt.advisors.graphs.executors.swap_executor import (
    Trip,
    Walk,
    best_walk,
    idle_trips,
    just_in_time,
    on_runs,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs


def superneurons(problem: GraphProblem) -> Answer:
    """SuperNeurons (PPoPP'18): keep the outputs of dear layers, recompute between them, copy them out by LRU when short."""
    forward = Forward(problem.graph)
    keep = checkpoints(forward)
    choices: list[tuple[list[int], list[Trip]]] = []
    if problem.may_recompute:
        runs = runs_keeping(forward, keep)
        choices.append((runs, []))
        if problem.may_swap:
            choices.append((runs, least_recent(problem, runs, keep)))
    if problem.may_swap:
        plain = plain_runs(problem.graph)
        choices.append((plain, least_recent(problem, plain, keep)))
    return best_walk(problem, choices, [just_in_time])


def least_recent(problem: GraphProblem, runs: list[int], keep: set[int]) -> list[Trip]:
    """Trips of checkpoints, oldest first, until the budget holds."""
    walk = Walk(problem, runs, [])
    plain = [trip for trip in idle_trips(problem.graph, plain_runs(problem.graph)) if trip.tensor in keep]
    chosen: list[Trip] = []
    for trip in on_runs(problem.graph, runs, plain):
        span = walk.memory[trip.leave + 1 : trip.need]
        if int(span.max(initial=0)) > problem.budget_bytes:
            span -= walk.size[trip.tensor]
            chosen.append(trip)
    return chosen
