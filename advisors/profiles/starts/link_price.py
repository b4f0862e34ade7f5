"""Starts for `auto` where there is a link: swaps that pay for the time of the link that they take.

A copy that hides costs nothing by itself, so that what is picked by its own cost swaps until the link is full and then waits. Here each millisecond
of the link has a price (the Lagrange multiplier of its time): what is dear to make again is swapped, the rest is made again. The price is not
known beforehand; those at which tensors change from one to the other are tried. Layers are alike, so that many change at one price: at each,
the link is filled to several shares of what it can take out while forward runs. Greedy, by bytes above the target a millisecond;
O(picks x (ops + tensors)) for each price. What it comes to is for the simulator to say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memopt.advisors.clock import OutOfTime
from memopt.advisors.profiles.picking import chain_given
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.decision import Decision

_QUANTILES = (0.25, 0.5, 0.1, 0.0, 0.75, 0.9)
"""Of what a millisecond of the link saves of recomputation, in the order in which they are tried."""
_FILLED = (0.9, 0.7, 1.2)
"""Shares of the link's time until the peak."""
_LOOKED_AT = 12
"""Of the most promising moves, for which bytes and chains are counted exactly."""
_LEAST_MS = 0.002
"""What any action costs at the least."""

Floats = NDArray[np.float64]


def link_priced_plans(problem: Problem) -> Iterator[Decisions]:
    """Decisions, one set a price. None where nothing can be swapped."""
    moves = _Moves(problem)
    seen: set[frozenset[tuple[int, str]]] = set()
    for price, share in itertools.product(moves.prices(), _FILLED):
        found = moves.picked(price, share * moves.window_ms)
        key = frozenset((storage, decision.kind) for storage, decision in found.items())
        if key not in seen:
            seen.add(key)
            yield found


class _Moves:
    """Every option of every candidate, in columns."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.moves = [(c, option) for c in problem.candidates.values() for option in c.options]
        self.begin = np.array([c.away.start for c, _ in self.moves], dtype=np.int64)
        self.end = np.array([c.away.stop for c, _ in self.moves], dtype=np.int64)
        self.relief = np.array([c.saved.size_bytes - o.encoded_bytes for c, o in self.moves], dtype=np.float64)  # fmt: skip
        self.own_ms = np.array([self._own_ms(c, o) for c, o in self.moves])
        self.link_ms = np.array([self._link_ms(c, o) for c, o in self.moves])
        first = min((c.saved.packed_op for c in problem.candidates.values()), default=0)
        times = problem.view.start_ms
        self.window_ms = float(times[problem.plain.peak_op] - times[min(first + 1, len(times) - 1)])
        """From when the first tensor can leave to the peak."""
        self.rows: dict[int, list[int]] = {}
        for row, (candidate, _) in enumerate(self.moves):
            self.rows.setdefault(candidate.storage, []).append(row)

    def prices(self) -> list[float]:
        """Of a millisecond of the link: what it saves where a tensor is swapped and not made again."""
        saves = [
            min((self.own_ms[row] for row in rows if not self.link_ms[row]), default=np.inf)
            / self.link_ms[swap]
            for rows in self.rows.values()
            for swap in rows
            if self.link_ms[swap]
        ]
        finite = [each for each in saves if np.isfinite(each)]
        return [float(np.quantile(finite, each)) for each in _QUANTILES] if finite else []

    def picked(self, price: float, link_ms: float) -> Decisions:
        """What is taken until no op is above the target, when a millisecond of the link costs `price` and there are `link_ms` of them."""
        problem = self.problem
        over = np.maximum(problem.plain.high_bytes - problem.target_bytes, 0).astype(np.float64)
        cost = self.own_ms + price * self.link_ms
        left = np.ones(len(self.moves), dtype=np.bool_)
        found: Decisions = {}
        while over.any() and left.any():
            if problem.seconds_left <= 0:
                raise OutOfTime
            row = self._best(over, cost, left, found)
            if row < 0:
                break
            candidate, option = self.moves[row]
            if self.link_ms[row]:
                link_ms -= float(self.link_ms[row])
                left &= self.link_ms <= max(0.0, link_ms)
            found[candidate.storage] = option
            left[self.rows[candidate.storage]] = False
            span = over[candidate.away]
            np.maximum(span - self.relief[row], 0, out=span)
        return found

    def _best(self, over: Floats, cost: Floats, left: NDArray[np.bool_], found: Decisions) -> int:
        """The move that takes away most bytes above the target a millisecond; -1: none takes away any."""
        count = np.concatenate([[0.0], np.cumsum(over > 0)])
        gain = (count[self.end] - count[self.begin]) * np.minimum(self.relief, over.max()) * left
        best, most = -1, 0.0
        for row in np.argsort(-gain / cost, kind="stable")[:_LOOKED_AT].tolist():
            if gain[row] <= 0:
                break
            candidate, option = self.moves[row]
            bytes_gone = float(np.minimum(over[candidate.away], self.relief[row]).sum())
            if option.kind == "recompute":
                cost[row] = self._replay_ms(candidate, option, found)
            if bytes_gone / cost[row] > most:
                best, most = row, bytes_gone / cost[row]
        return best

    def _replay_ms(self, candidate: Candidate, option: Decision, found: Decisions) -> float:
        chain = chain_given(self.problem, candidate, option, found)
        return _LEAST_MS + (self.problem.replay_ms(chain) if chain is not None else float("inf"))

    def _own_ms(self, candidate: Candidate, option: Decision) -> float:
        if option.kind == "swap":
            return _LEAST_MS + self.problem.simulator.staging_ms(candidate.saved)
        return _LEAST_MS + self.problem.solo_ms(candidate, option)

    def _link_ms(self, candidate: Candidate, option: Decision) -> float:
        if option.kind != "swap":
            return 0.0
        copy_ms = self.problem.simulator.copy_ms
        return max(copy_ms(candidate.saved.size_bytes, option, out=out) for out in (True, False))
