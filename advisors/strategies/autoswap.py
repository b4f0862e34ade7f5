"""AutoSwap of SmartPool (Zhang et al. 2019, arXiv 1903.06631): swap the tensors with the best absence scores across the peak.

Rule: only tensors of a megabyte or more that nobody uses across the peak; score them by DOA (duration of absence beyond the
copies), AOA (size x DOA), WDOA (absence weighted by the load above the limit) or SWDOA (WDOA recomputed after each pick);
take them in order until the load is below the limit. Swap-outs run in trigger order, swap-ins are laid backwards from the
uses on one link, earlier where they overlap. The best of the four that fits wins. O(n^2) for SWDOA, O(n log n) for the others.
On profiles: how many of them go is what the simulator finds to suffice, not a count of bytes; where nothing is idle across the
peak, all are looked at, since another op may be above the budget too; SWDOA looks at the `_MOST_GREEDY` largest.
On graphs: as many go as bytes say; an absence counts whole, its copies included, and weighs by the load above the budget and size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.executors.swap_executor import Copies, Trip, Walk, just_in_time
from memopt.advisors.profiles.picking import prefix_that_suffices, swap_of, swappable
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.registry import A_LINK, SWAPS, strategy
from memopt.estimators.simulator.decision import Decision

_MOST_GREEDY = 300
"""SWDOA looks at every tensor again after each pick: at most this many, the largest."""

Picks = list[tuple[int, Decision]]


SCORES = ("doa", "aoa", "wdoa", "swdoa")

autoswap = strategy(
    "autoswap",
    paper="Zhang et al. 2019, Efficient Memory Management for GPU-based Deep Learning Systems",
    needs=A_LINK,
    allows=SWAPS,
)


@autoswap.profiles
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
        yield prefix_that_suffices(problem, picks)
    yield prefix_that_suffices(problem, _submodular(problem, able, over))


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


@autoswap.graph_trips
def on_graph(board: GraphBoard) -> Iterator[Copies]:
    """AutoSwap (2019): idle tensors across the peak by absence, area and load above the budget."""
    for score in SCORES:
        yield pick(board, score), just_in_time


def pick(board: GraphBoard, score: str) -> list[Trip]:
    """Trips in order of their score until the budget holds."""
    walk = Walk(board.problem, board.runs, [])
    memory, least_bytes = walk.memory, max(walk.size, default=0) // 1000

    def value(trip: Trip, load: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        absence = float(walk.clock[trip.need] - walk.clock[trip.leave + 1])
        if score == "doa":
            return absence
        if score == "aoa":
            return absence * walk.size[trip.tensor]
        return float(load[trip.need] - load[trip.leave + 1]) * walk.size[trip.tensor]

    def load_above() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        over = np.maximum(memory[:-1] - board.target_bytes, 0) * np.diff(walk.clock)
        return np.concatenate(([0.0], np.cumsum(over)))

    load = load_above()
    able = [trip for trip in board.trips if walk.size[trip.tensor] >= least_bytes]
    order = sorted(able, key=lambda trip: -value(trip, load))

    def anew() -> Iterator[Trip]:
        """The best by what is above the budget after each pick."""
        while order:
            load = load_above()
            yield order.pop(max(range(len(order)), key=lambda index: value(order[index], load)))

    return walk.until_it_fits(anew() if score == "swdoa" else order)
