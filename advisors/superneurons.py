"""SuperNeurons (Wang et al., PPoPP 2018): heavy layers' outputs are checkpoints and may be offloaded, the rest is recomputed.

Rule: outputs of convolutions (here also of matrix products, attention and recurrent layers) are checkpoints; what lies
between them is dropped and recomputed; checkpoints go through a least-recently-used tensor cache that moves data only when
memory runs out: here the oldest checkpoints are offloaded, as many as the budget needs. O(n) plans. Differs: segments are
always recomputed once and kept until their last use (speed-centric), as the enforcer does, also where a segment is larger
than the largest layer (memory-centric).
"""

from __future__ import annotations

from memopt.advisors.picks import is_heavy, made_by, prefix_that_fits, swap_of
from memopt.advisors.prefetch import place_prefetches
from memopt.advisors.problem import Decisions, Problem
from memopt.estimators.decision import RECOMPUTE, Decision


class Superneurons:
    name = "superneurons"
    paper = "Wang et al. 2018, SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks"
    needs = "cheap layers between heavy ones; a link, for tight budgets"
    allows = frozenset({"swap-host", "swap-disk", "recompute"})

    def plan(self, problem: Problem, /) -> Decisions:
        checkpoints, rest = [], {}
        for candidate in problem.candidates.values():
            if is_heavy(made_by(problem, candidate.saved)):
                checkpoints.append(candidate)
            elif candidate.chain is not None:
                rest[candidate.storage] = RECOMPUTE
        checkpoints.sort(key=lambda c: c.saved.gone_after)
        picks = [(c.storage, swap_of(c)) for c in checkpoints if c.option("swap") is not None]

        def place(problem: Problem, offloaded: dict[int, Decision]) -> Decisions:
            return place_prefetches(problem, rest | offloaded)

        return prefix_that_fits(problem, picks, self.name, place)
