"""Sentinel (Ren et al., HPCA 2021, arXiv 1909.05182): long-lived tensors migrate by intervals, short-lived ones never.

Rule: tensors that live no longer than a layer stay. The iteration is cut into migration intervals; during an interval what the
next one needs is fetched, and what it does not need is evicted. The length of the interval is found by enumeration: the least
exposed time among those that fit. O(lengths) plans. Differs: page-level grouping does not arise, storages are the unit;
intervals are counted in ops, since a script's layers are of any number of ops, and what is idle for less than an interval
stays, the short-lived among it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from memopt.advisors.profiles.picking import cheapest_fitting, swap_of, swappable
from memopt.advisors.profiles.problem import Decisions, Problem

_LENGTHS = 24
"""Lengths of an interval that are tried, from two to half of all: each is a judgement."""


class Sentinel:
    name = "sentinel"
    paper = (
        "Ren et al. 2021, Sentinel: Efficient Tensor Migration and Allocation on Heterogeneous Memory Systems"
    )
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def plan(self, problem: Problem, /) -> Decisions:
        return cheapest_fitting(problem, sentinel_plans(problem), self.name)


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
