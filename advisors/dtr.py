"""Dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616), planned offline.

Rule: when an op does not fit, evict the tensor with the least h = cost / (bytes x staleness). `dtr` counts in the cost the
evicted neighbourhood that would have to be made again; `dtr-eqclass` approximates it by union-find classes, whose cost is
shared; `dtr-local` counts the op alone; `dtr-megengine` multiplies by 1.0001 to the number of evictions, adds the free bytes
beside the tensor (here none) and takes tensors above 1 MB only. Here the iteration is known: walk to the first op
above the budget under the plan so far, evict there, and judge again; a tensor stays evicted. O(n) simulations.
Differs: what comes back stays until its last use, so nothing is evicted twice.
"""

from __future__ import annotations

import numpy as np

from memopt.advisors.blockers import infeasible
from memopt.advisors.capuchin import chain_given
from memopt.advisors.problem import Candidate, Decisions, Problem
from memopt.estimators.decision import RECOMPUTE

_LARGE = 1 << 20


class Dtr:
    paper = "Kirisame et al. 2021, Dynamic Tensor Rematerialization"
    needs = "activations that can be made again"
    allows = frozenset({"recompute"})

    def __init__(self, variant: str = "") -> None:
        self.variant = variant
        self.name = f"dtr-{variant}" if variant else "dtr"

    def plan(self, problem: Problem, /) -> Decisions:
        decisions: Decisions = {}
        nearest: Decisions = {}
        classes = _Classes(problem)
        while True:
            timeline = problem.run(decisions)
            if timeline.peak_bytes < problem.run(nearest).peak_bytes:
                nearest = decisions
            if problem.fits(timeline):
                return decisions
            over = np.flatnonzero(timeline.high_bytes > problem.target_bytes)
            victim = next(
                (v for op in over if (v := self._victim(problem, decisions, classes, int(op))) is not None),
                None,
            )
            if victim is None:
                raise infeasible(problem, nearest, self.name)
            decisions = {**decisions, victim.storage: RECOMPUTE}
            classes.evict(victim)

    def _victim(self, problem: Problem, decisions: Decisions, classes: _Classes, op: int) -> Candidate | None:
        able = [
            c
            for c in problem.candidates.values()
            if c.chain is not None
            and c.storage not in decisions
            and c.away.start <= op < c.away.stop
            and (
                self.variant != "megengine"
                or c.saved.size_bytes >= min(_LARGE, problem.unplanned_peak_bytes // 500)
            )
        ]
        return min(able, key=lambda c: self._score(problem, decisions, classes, c, op), default=None)

    def _score(
        self, problem: Problem, decisions: Decisions, classes: _Classes, candidate: Candidate, op: int
    ) -> float:
        view = problem.view
        own_ms = float(view.op_ms[view.value_producer[candidate.saved.value]])
        if self.variant == "local":
            cost = own_ms
        elif self.variant == "eqclass":
            cost = own_ms + classes.neighbour_ms(candidate)
        else:
            chain = chain_given(problem, candidate, decisions)
            cost = float(sum(view.op_ms[o] for o in chain.ops)) if chain is not None else 1e9
        if self.variant == "megengine":
            cost = (cost + 1e-3) * 1.0001 ** len(decisions)
        stale_ms = (
            float(view.start_ms[op] - view.start_ms[min(candidate.saved.gone_after, view.n - 1)]) + 1e-3
        )
        return cost / (candidate.saved.size_bytes * stale_ms)


class _Classes:
    """Union-find over evicted tensors that stand on each other, with the time that each class takes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parent: dict[int, int] = {}
        self.ms: dict[int, float] = {}

    def find(self, storage: int) -> int:
        while self.parent[storage] != storage:
            storage = self.parent[storage]
        return storage

    def evict(self, candidate: Candidate) -> None:
        view, storage = self.problem.view, candidate.storage
        self.parent[storage] = storage
        self.ms[storage] = float(view.op_ms[view.value_producer[candidate.saved.value]])
        for other in self._neighbours(candidate):
            root, mine = self.find(other), self.find(storage)
            if root != mine:
                self.parent[root] = mine
                self.ms[mine] += self.ms[root]

    def neighbour_ms(self, candidate: Candidate) -> float:
        return sum(self.ms[root] for root in {self.find(s) for s in self._neighbours(candidate)})

    def _neighbours(self, candidate: Candidate) -> set[int]:
        """Evicted tensors that it is made from, or that are made from it."""
        view = self.problem.view
        near = set()
        if candidate.chain is not None:
            near |= {view.value_storage[value] for value in candidate.chain.sources} & set(self.parent)
        for storage in self.parent:
            other = self.problem.candidates[storage]
            if other.chain is not None and candidate.saved.value in other.chain.sources:
                near.add(storage)
        return near - {candidate.storage}
