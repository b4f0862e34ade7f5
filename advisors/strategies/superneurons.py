"""SuperNeurons (Wang et al., PPoPP 2018): heavy layers' outputs are checkpoints and may be offloaded, the rest is recomputed.

Rule: outputs of convolutions (here also of matrix products, attention and recurrent layers) are checkpoints; what lies between
them is dropped and recomputed, by cost: a segment that takes no more than the layer whose backward needs the most is made once
and kept until its last use (speed-centric), a larger one is made anew for each use (memory-centric). Checkpoints go through a
least-recently-used tensor cache that moves data only when memory runs out: here the oldest are offloaded, as many as the budget
needs. O(n) plans. Differs: softmax, a checkpoint there as a net's last layer, is recomputed as any, for in attention it is
neither last nor costly; segments are what is saved between two checkpoints in the order of saving, whatever the branches; a
layer's need is what its backward op reads and writes, and its workspace.
"""

from __future__ import annotations

from memopt.advisors.profiles.picking import is_heavy, made_by, prefix_that_fits, swap_of
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, Decision
from memopt.trace import PHASES

_BACKWARD = PHASES.index("backward")


class Superneurons:
    name = "superneurons"
    paper = "Wang et al. 2018, SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks"
    needs = "cheap layers between heavy ones; a link, for tight budgets"
    allows = frozenset({"swap-host", "swap-disk", "recompute"})

    def plan(self, problem: Problem, /) -> Decisions:
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

        return prefix_that_fits(problem, picks, self.name, place)


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
