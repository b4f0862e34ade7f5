"""Gist (Jain et al., ISCA 2018): keep between forward and backward only what backward reads of each tensor.

Rule: binarize what ReLU's backward asks (1 bit) and max-pool's (a position inside the window), in all layers; drop what is never
read. O(n). Differs: the set of readers is the table of `simulator/slot_needs.py` (all nodes, not ReLU and pooling alone); the
sparse encoding depends on the data and is left out, since the profile says nothing of it; delayed precision reduction is
lossy and is not planned. What is not needed for the budget is kept as it is, largest savings first.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopt.advisors.profiles.picking import prefix_that_suffices
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import strategy

gist = strategy(
    "gist",
    paper="Jain et al. 2018, Gist: Efficient Data Encoding for Deep Neural Network Training",
    needs="ReLU-like activations, pooling, dropout",
    allows=frozenset({"compress"}),
    not_on_graphs="which encoding a tensor bears depends on the ops that read it and on its values",
)


@gist.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """The largest savings first, until the rest fits."""
    encodable = [(c, c.codec.decision) for c in problem.candidates.values() if c.codec is not None]
    encodable.sort(key=lambda pair: pair[1].encoded_bytes - pair[0].saved.size_bytes)
    yield prefix_that_suffices(problem, [(c.storage, decision) for c, decision in encodable])
