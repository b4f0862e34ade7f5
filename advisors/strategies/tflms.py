"""TFLMS (Le et al. 2018, arXiv 1807.02037): swap along every edge that is longer than a threshold, back a fixed window ahead.

Rule: ops in topological order; for every edge from forward to backward whose distance exceeds a threshold, swap out after the
last forward consumer and swap in `lb..ub` ops before the consumer. Differs: one swap-in serves all
consumers of a storage, whatever the distance between them; the cheapest plan that fits wins.
On profiles the threshold is swept from long edges to all, and the window over a few lengths. O(thresholds x windows) plans.
On graphs the largest threshold at which the bytes fit is found by bisection, and tried with half of it and with all. O(trips log ops).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.executors.swap_executor import Copies, Trip, ahead
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import A_LINK, SWAPS, strategy

_WINDOWS = (2, 8, 24)
_THRESHOLDS = 16
"""Quantiles of how far apart the uses of a tensor lie: each is tried with each window."""


tflms = strategy(
    "tflms",
    paper="Le et al. 2018, TFLMS: Large Model Support in TensorFlow by Graph Rewriting",
    needs=A_LINK,
    allows=SWAPS,
)


@tflms.profiles
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


@tflms.graph_trips
def longer_trips(board: GraphBoard) -> Iterator[Copies]:
    """TFLMS (2018): edges longer than a threshold leave, and come back within a window before their consumer."""

    def longer(threshold: int) -> list[Trip]:
        return [trip for trip in board.trips if trip.need - trip.leave > threshold]

    low, high = 1, len(board.runs)
    while low < high:
        middle = (low + high + 1) // 2
        if int(board.load_without(longer(middle)).max()) <= board.target_bytes:
            low = middle
        else:
            high = middle - 1
    for threshold in sorted({low, max(1, low // 2), 1}, reverse=True):
        for window in (4, 16):
            yield longer(threshold), ahead(window)
