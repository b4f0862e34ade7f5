"""vDNN++ (Garg and Kulkarni, IPDPS 2019): offload without waiting per layer, and prefetch as early as memory allows.

Rule: forward stalls only when an allocation does not fit and an offload is pending, backward only when a tensor has not
arrived; each tensor is fetched as far ahead as the free memory allows. O(n^2) in the number of tensors. Differs: the
two-ended placement against fragmentation and the limits on pinned buffers belong to the allocator and the enforcer.
On graphs the inputs of convolutions alone are offloaded where that suffices, as in `vdnn`.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopt.advisors.graphs.executors.swap_executor import as_soon_as_possible
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import A_LINK, SWAPS, strategy
from memopt.advisors.strategies.vdnn import first_that_fits

vdnn_plus = strategy(
    "vdnn++",
    paper="Garg and Kulkarni 2019, Dynamic Memory Management for GPU-based Training of Deep Neural Networks",
    needs=A_LINK,
    allows=SWAPS,
)


@vdnn_plus.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """Everything away, and back as early as memory allows."""
    away = {candidate.storage: swap_of(candidate) for candidate in swappable(problem)}
    yield place_prefetches(problem, away, earliest=True)


@vdnn_plus.graphs
def on_graph(problem: GraphProblem) -> Answer:
    """vDNN++ (IPDPS'19): the same copies, prefetched as far ahead as memory allows."""
    return first_that_fits(problem, as_soon_as_possible)
