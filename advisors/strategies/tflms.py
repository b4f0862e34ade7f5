"""TFLMS (Le et al. 2018, arXiv 1807.02037): swap along every edge that is longer than a threshold, back a fixed window ahead.

Rule: ops in topological order; for every edge from forward to backward whose distance exceeds a threshold, swap out after the
last forward consumer and swap in `lb..ub` ops before the consumer. Here the threshold is swept from long edges to all, and the
window over a few lengths; the cheapest that fits wins. O(thresholds x windows) plans. Differs: one swap-in serves all
consumers of a storage, whatever the distance between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from memopt.advisors.profiles.picking import cheapest_fitting, swap_of, swappable
from memopt.advisors.profiles.problem import Decisions, Problem

_WINDOWS = (2, 8, 24)
_THRESHOLDS = 16
"""Quantiles of how far apart the uses of a tensor lie: each is tried with each window."""


class Tflms:
    name = "tflms"
    paper = "Le et al. 2018, TFLMS: Large Model Support in TensorFlow by Graph Rewriting"
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def plan(self, problem: Problem, /) -> Decisions:
        return cheapest_fitting(problem, tflms_plans(problem), self.name)


def tflms_plans(problem: Problem) -> Iterator[Decisions]:
    """One plan for each pair of a threshold and a prefetch window."""
    able = swappable(problem)
    if not able:
        return
    triggers = problem.triggers
    lengths = np.array([c.saved.first_use - c.saved.gone_after for c in able])
    for threshold in np.unique(np.quantile(lengths, np.linspace(0.9, 0.0, _THRESHOLDS), method="lower")):
        for window in _WINDOWS:
            decisions: Decisions = {}
            for candidate, length in zip(able, lengths, strict=True):
                if length >= threshold:
                    saved = candidate.saved
                    early = triggers[(triggers > saved.gone_after) & (triggers <= saved.first_use - window)]
                    trigger = int(early[-1]) if early.size else -1
                    decisions[candidate.storage] = replace(swap_of(candidate), prefetch_op=trigger)
            yield decisions
