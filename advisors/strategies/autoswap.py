"""AutoSwap of SmartPool (Zhang et al. 2019, arXiv 1903.06631): swap the tensors with the best absence scores across the peak.

Rule: only tensors of a megabyte or more that nobody uses across the peak; score them by DOA (duration of absence beyond the
copies), AOA (size x DOA), WDOA (absence weighted by the load above the limit) or SWDOA (WDOA recomputed after each pick);
take them in order until the load is below the limit. Swap-outs run in trigger order, swap-ins are laid backwards from the
uses on one link, earlier where they overlap. The best of the four that fits wins. O(n^2) for SWDOA, O(n log n) for the others.
Differs: how many of them go is what the simulator finds to suffice, not a count of bytes; where nothing is idle across the
peak, all are looked at, since another op may be above the budget too; SWDOA looks at the `_MOST_GREEDY` largest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopt.advisors.profiles.picking import cheapest_fitting, shortest_fitting, swap_of, swappable
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.decision import Decision

_MOST_GREEDY = 300
"""SWDOA looks at every tensor again after each pick: at most this many, the largest."""

Picks = list[tuple[int, Decision]]


class Autoswap:
    name = "autoswap"
    paper = "Zhang et al. 2019, Efficient Memory Management for GPU-based Deep Learning Systems"
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def plan(self, problem: Problem, /) -> Decisions:
        return cheapest_fitting(problem, autoswap_plans(problem), self.name)


def autoswap_plans(problem: Problem) -> Iterator[Decisions]:
    """The plan of each score, or what came nearest."""
    peak = problem.plain.peak_op
    able = [c for c in swappable(problem) if c.away.start <= peak < c.away.stop] or swappable(problem)
    over = np.maximum(problem.plain.high_bytes - problem.target_bytes, 0).astype(np.float64)

    def weighted(candidate: Candidate) -> float:
        return float(over[candidate.away].sum()) * max(0.0, _absence_ms(problem, candidate))

    scores = (
        lambda c: _absence_ms(problem, c),
        lambda c: c.saved.size_bytes * _absence_ms(problem, c),
        weighted,
    )
    for score in scores:
        picks: Picks = [(c.storage, swap_of(c)) for c in sorted(able, key=lambda c: -score(c))]
        best, nearest = shortest_fitting(problem, picks)
        yield best if best is not None else nearest
    best, nearest = shortest_fitting(problem, _submodular(problem, able, over))
    yield best if best is not None else nearest


def _submodular(
    problem: Problem, able: list[Candidate], over: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> Picks:
    """SWDOA: after each pick the load above the limit is what is left of it."""
    left, load, picks = list(able), over.copy(), []
    if len(able) > _MOST_GREEDY:
        left = sorted(able, key=lambda c: -c.saved.size_bytes)[:_MOST_GREEDY]
    while left:
        best = max(
            left,
            key=lambda c: (
                float(np.minimum(load[c.away], c.saved.size_bytes).sum()) * max(1e-6, _absence_ms(problem, c))
            ),
        )
        left.remove(best)
        picks.append((best.storage, swap_of(best)))
        load[best.away] = np.maximum(load[best.away] - best.saved.size_bytes, 0)
    return picks


def _absence_ms(problem: Problem, candidate: Candidate) -> float:
    return problem.free_ms(candidate.saved, swap_of(candidate))
