"""SuperNeurons (Wang et al., PPoPP 2018): heavy layers' outputs are checkpoints and may be offloaded, the rest is recomputed.

Rule: outputs of convolutions are checkpoints; what lies between
them is dropped and recomputed, by cost: a segment that takes no more than the layer whose backward needs the most is made once
and kept until its last use (speed-centric), a larger one is made anew for each use (memory-centric). Checkpoints go through a
least-recently-used tensor cache that moves data only when memory runs out: here the oldest are offloaded, as many as the budget
needs. Differs: softmax, a checkpoint there as a net's last layer, is recomputed as any, for in attention it is neither last nor costly.
On profiles matrix products, attention and recurrent layers are checkpoints, too; segments are what is saved between two checkpoints in the
order of saving, whatever the branches; a layer's need is what its backward op reads and writes, and its workspace. O(n) plans.
On graphs the outputs of the dearest ops are checkpoints where none is a convolution's; all segments are speed-centric; what is cheapest of
recomputing, of that with checkpoints offloaded, and of offloading alone is taken. O(edges) a plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopt.advisors.graphs.executors.segments import Forward, checkpoints, runs_keeping
from memopt.advisors.graphs.executors.swap_executor import (
    Prefetch,
    Trip,
    Walk,
    best_walk,
    idle_trips,
    just_in_time,
    on_runs,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs
from memopt.advisors.profiles.picking import is_heavy, made_by, prefix_that_suffices, swap_of
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.registry import RECOMPUTES, SWAPS, strategy
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, Decision
from memopt.trace import PHASES

_BACKWARD = PHASES.index("backward")


superneurons = strategy(
    "superneurons",
    paper="Wang et al. 2018, SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks",
    needs="cheap layers between heavy ones; a link, for tight budgets",
    allows=SWAPS | RECOMPUTES,
)


@superneurons.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """All between the checkpoints made again, and as many of the oldest checkpoints offloaded as the budget needs."""
    checkpoints, segments = in_segments(problem)
    largest = largest_layer_bytes(problem)
    rest: Decisions = {}
    for segment in segments:
        size = sum(candidate.saved.size_bytes for candidate in segment)
        how = RECOMPUTE if size <= largest else RECOMPUTE_AGAIN
        rest |= {candidate.storage: how for candidate in segment}
    picks = [(c.storage, swap_of(c)) for c in checkpoints if c.option("swap") is not None]

    def place(problem: Problem, offloaded: dict[int, Decision]) -> Decisions:
        return place_prefetches(problem, rest | offloaded)

    yield prefix_that_suffices(problem, picks, place)


def in_segments(problem: Problem) -> tuple[list[Candidate], list[list[Candidate]]]:
    """Checkpoints, the oldest first, and what can be made again between each two of them."""
    checkpoints: list[Candidate] = []
    segments: list[list[Candidate]] = [[]]
    for candidate in sorted(problem.candidates.values(), key=lambda c: c.saved.packed_op):
        if is_heavy(made_by(problem, candidate.saved)):
            checkpoints.append(candidate)
            segments.append([])
        elif candidate.chain is not None:
            segments[-1].append(candidate)
    checkpoints.sort(key=lambda c: c.saved.gone_after)
    return checkpoints, segments


def largest_layer_bytes(problem: Problem) -> int:
    """Most that one op of backward reads, writes and works on."""
    view = problem.view
    needs = (
        sum(
            int(view.size[storage])
            for storage in {view.value_storage[value] for value in (*view.reads[op], *view.writes[op])}
        )
        + int(view.workspace[op])
        for op in range(view.n)
        if view.phase[op] == _BACKWARD
    )
    return max(needs, default=0)


@superneurons.graphs
def on_graph(problem: GraphProblem) -> Answer:
    """SuperNeurons (PPoPP'18): keep the outputs of dear layers, recompute between them, copy them out by LRU when short."""
    forward = Forward(problem.graph)
    keep = checkpoints(forward)
    again = [runs_keeping(forward, keep)] if problem.may_recompute else []
    choices: list[tuple[list[int], list[Trip], Prefetch]] = [(runs, [], just_in_time) for runs in again]
    for runs in (*again, plain_runs(problem.graph)) if problem.may_swap else ():
        choices.append((runs, least_recent(problem, runs, keep), just_in_time))
    return best_walk(problem, choices)


def least_recent(problem: GraphProblem, runs: list[int], keep: set[int]) -> list[Trip]:
    """Trips of checkpoints, oldest first, until the budget holds."""
    walk = Walk(problem, runs, [])
    plain = [trip for trip in idle_trips(problem.graph, plain_runs(problem.graph)) if trip.tensor in keep]
    return walk.until_it_fits(on_runs(problem.graph, runs, plain))
