"""Gist (Jain et al., ISCA 2018): keep between forward and backward only what backward reads of each tensor.

Rule: binarize what ReLU's backward asks (1 bit) and max-pool's (a position inside the window), in all layers; drop what is never
read. O(n). Differs: the set of readers is the table of `estimators.slot_needs` (all nodes, not ReLU and pooling alone); the
sparse encoding depends on the data and is left out, since the profile says nothing of it; delayed precision reduction is
lossy and is not planned. What is not needed for the budget is kept as it is, largest savings first.
"""

from __future__ import annotations

from memopt.advisors.profiles.picking import prefix_that_fits
from memopt.advisors.profiles.problem import Decisions, Problem


class Gist:
    name = "gist"
    paper = "Jain et al. 2018, Gist: Efficient Data Encoding for Deep Neural Network Training"
    needs = "ReLU-like activations, pooling, dropout"
    allows = frozenset({"compress"})

    def plan(self, problem: Problem, /) -> Decisions:
        encodable = [(c, c.codec.decision) for c in problem.candidates.values() if c.codec is not None]
        encodable.sort(key=lambda pair: pair[1].encoded_bytes - pair[0].saved.size_bytes)
        return prefix_that_fits(problem, [(c.storage, decision) for c, decision in encodable], self.name)
