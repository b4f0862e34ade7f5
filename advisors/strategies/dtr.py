"""Dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616), planned offline.

Rule: when an op does not fit, evict the tensor with the least h = cost / (bytes x staleness). `dtr` counts in the cost the
evicted neighbourhood, ancestors and descendants, that would have to be made again; `dtr-eqclass` approximates it by union-find
classes, whose cost is shared; `dtr-local` counts the op alone; `dtr-megengine` is MegEngine's form: classes, costs told by the
bytes that are touched, no small tensors. The scores are those of `graphs.scores`. Here the iteration is known: walk to the first op above the budget under the
plan so far, evict there, and judge again; a tensor stays evicted. O(n) simulations.
Differs: what comes back stays until its last use, so nothing is evicted twice, and MegEngine's 1.0001 to the number of a
tensor's recomputations is 1 whenever it is asked for; its free bytes beside a tensor are not known. What nobody saved is
deallocated, which DTR counts as evicted: here its cost is in that of the tensors that are made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from memopt.advisors.graphs.executors import scores
from memopt.advisors.profiles.blockers import infeasible
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.decision import RECOMPUTE

if TYPE_CHECKING:
    from memopt.advisors.graphs.executors.engine import Engine
    from memopt.estimators.simulator.trace_view import Floats

_SCORES: dict[str, type[scores.PlainScore]] = {
    "": scores.Dtr,
    "eqclass": scores.EqClass,
    "local": scores.Local,
    "megengine": scores.MegEngine,
}


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
        walk = Evictions(problem, self.variant)
        while True:
            timeline = problem.run(decisions)
            if timeline.peak_bytes < problem.run(nearest).peak_bytes:
                nearest = decisions
            if problem.fits(timeline):
                return decisions
            over = np.flatnonzero(timeline.high_bytes > problem.target_bytes)
            victim = next((v for op in over.tolist() if (v := walk.victim(op)) is not None), None)
            if victim is None:
                raise infeasible(problem, nearest, self.name)
            decisions = {**decisions, victim.storage: RECOMPUTE}
            walk.evict(victim)


@dataclass(frozen=True, slots=True)
class _Graph:
    """Row i: the op that makes candidate i, with all that is made on the way, of other candidates."""

    tensor_count: int
    reads: list[tuple[int, ...]]
    resident_reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]


class Evictions:
    """What is evicted so far, and what a score says to evict next. To the score it is the engine that runs the graph of the candidates."""

    def __init__(self, problem: Problem, variant: str) -> None:
        view = self.view = problem.view
        self.candidates = [c for c in problem.candidates.values() if c.chain is not None]
        numbers = {c.saved.value: i for i, c in enumerate(self.candidates)}
        chains = [c.chain for c in self.candidates if c.chain is not None]
        self.graph = _Graph(
            len(chains),
            [tuple(numbers[v] for v in chain.sources if v in numbers) for chain in chains],
            [() for _ in chains],
            [(i,) for i in range(len(chains))],
        )
        self.maker = range(len(chains))
        alone = variant == "local"
        self.cost_column: Floats = np.array(
            [
                float(
                    view.op_ms[view.value_producer[c.saved.value]]
                    if alone
                    else view.op_ms[[*chain.ops]].sum()
                )
                for c, chain in zip(self.candidates, chains, strict=True)
            ]
        )
        self.size = [c.saved.size_bytes for c in self.candidates]
        self.size_column: Floats = np.array(self.size, dtype=np.float64)
        self.last_access: Floats = np.array(
            [float(view.start_ms[min(c.saved.gone_after, view.n - 1)]) for c in self.candidates]
        )
        self.clock = 0.0
        self.may_go = [True] * len(chains)
        self.score = _SCORES[variant]()
        self.score.start(cast("Engine", self))

    def count_time(self, costs: list[float]) -> None:
        """Let `costs` stand for the time that each candidate takes to be made again."""
        self.cost_column = np.array(costs)

    def victim(self, op: int) -> Candidate | None:
        """The tensor to evict at `op`; None when there is none."""
        able = [
            i for i, c in enumerate(self.candidates) if self.may_go[i] and c.away.start <= op < c.away.stop
        ]
        if not able:
            return None
        self.clock = float(self.view.start_ms[op])
        return self.candidates[able[int(np.argmin(self.score(np.array(able))))]]

    def evict(self, candidate: Candidate) -> None:
        number = self.candidates.index(candidate)
        self.may_go[number] = False
        self.score.evicted(number)
