"""Sentinel (Ren et al., HPCA 2021, arXiv 1909.05182): long-lived tensors migrate by intervals, short-lived ones never.

Rule: tensors that live no longer than a layer stay. The iteration is cut into migration intervals; during an interval what the
next one needs is fetched, and what it does not need is evicted. The length of the interval is found by enumeration: the least
exposed time among those that fit. Differs: page-level grouping does not arise, storages are the unit; intervals are counted in ops, since
a script's layers are of any number of ops, and what is idle for less than an interval stays, the short-lived among it.
On profiles `_LENGTHS` lengths are tried, each a judgement. On graphs each power of two is, and a tensor leaves at the end of the interval
of its last use.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.executors.swap_executor import Copies, Prefetch, Trip, Walk
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import A_LINK, SWAPS, strategy

_LENGTHS = 24
"""Lengths of an interval that are tried, from two to half of all: each is a judgement."""


sentinel = strategy(
    "sentinel",
    paper="Ren et al. 2021, Sentinel: Efficient Tensor Migration and Allocation on Heterogeneous Memory Systems",
    needs=A_LINK,
    allows=SWAPS,
)


@sentinel.profiles
def sentinel_plans(problem: Problem) -> Iterator[Decisions]:
    """One plan for each length of the interval, in ops."""
    n = problem.view.n
    triggers = problem.triggers
    for length in np.unique(np.geomspace(2, max(2, n // 2), _LENGTHS).astype(int)):
        decisions: Decisions = {}
        for candidate in swappable(problem):
            saved = candidate.saved
            if saved.first_use - saved.gone_after <= length:
                continue
            begin = (saved.first_use // length - 1) * length
            inside = triggers[(triggers >= max(begin, saved.gone_after + 1)) & (triggers < saved.first_use)]
            trigger = int(inside[0]) if inside.size else -1
            decisions[candidate.storage] = replace(swap_of(candidate), prefetch_op=trigger)
        yield decisions


@sentinel.graph_trips
def by_intervals(board: GraphBoard) -> Iterator[Copies]:
    """Sentinel (HPCA'21): long-lived tensors migrate by intervals; the best interval by enumeration."""
    interval = 1
    while interval < max(2, len(board.runs) // 4):
        trips = [
            Trip(trip.tensor, min(end_of(trip.leave, interval), trip.need - 1), trip.need)
            for trip in board.trips
            if trip.need // interval - trip.leave // interval >= 2
        ]
        yield trips, interval_before(interval)
        interval *= 2


def end_of(position: int, interval: int) -> int:
    """Last run of the interval of `position`."""
    return (position // interval + 1) * interval - 1


def interval_before(interval: int) -> Prefetch:
    """The start of the interval before the one that needs the tensor."""

    def rule(walk: Walk, trip: Trip) -> int:
        return max(0, trip.need // interval - 1) * interval

    return rule
