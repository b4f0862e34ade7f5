"""Dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616), planned offline; and what it is compared with.

Rule: when an op does not fit, evict the tensor with the least h = cost / (bytes x staleness). `dtr` counts in the cost the
evicted neighbourhood, ancestors and descendants, that would have to be made again; `dtr-eqclass` approximates it by union-find
classes, whose cost is shared; `dtr-local` counts the op alone; `dtr-megengine` is MegEngine's form: classes, costs told by the
bytes that are touched, no small tensors. The scores, the same for both, are those of `executors/scores`.
On profiles the iteration is known: walk to the first op above the budget under the plan so far, evict there, and judge again; a tensor
stays evicted. O(n) simulations. What comes back stays until its last use, so nothing is evicted twice, and MegEngine's 1.0001 to the
number of a tensor's recomputations is 1 whenever it is asked for; its free bytes beside a tensor are not known. What nobody saved is
deallocated, which DTR counts as evicted: here its cost is in that of the tensors that are made of it.
On graphs the engine runs op by op (`executors/engine`). O(evictions x tensors on the device). There are the paper's ablations (`msps`, `lru`,
`size`), Belady's furthest next use (SwapAdvisor's rule of eviction, here with recomputation), and `next-use`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from memopt.advisors.graphs.executors import scores
from memopt.advisors.graphs.executors.engine import Engine, Ledger, Score, Stuck
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import peak_of_runs, plain_runs, steps_of_runs
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.registry import RECOMPUTES, REPLAYABLE, strategy
from memopt.estimators.simulator.decision import RECOMPUTE

WORDS = {
    "dtr": "h_DTR (Kirisame et al., ICLR'21): cost with evicted neighbourhood over bytes and staleness",
    "dtr-eqclass": "h_DTR with the neighbourhood approximated by union-find classes",
    "dtr-local": "h_DTR without the neighbourhood",
    "msps": "memory saved per second of recomputation (Capuchin's rule, online)",
    "lru": "least recently used first",
    "size": "largest first",
    "belady": "furthest next use first",
    "dtr-megengine": "MegEngine's DTR score, in bytes touched instead of time, without addresses",
    "next-use": "memory saved per second over the distance to the next use (known beforehand)",
}


def evicted(problem: Problem, score: str) -> Iterator[Decisions]:
    """What is evicted until the rest fits; where nothing is left to evict, what came nearest."""
    decisions: Decisions = {}
    nearest: Decisions = {}
    walk = Evictions(problem, score)
    while True:
        timeline = problem.run(decisions)
        if timeline.peak_bytes < problem.run(nearest).peak_bytes:
            nearest = decisions
        if problem.fits(timeline):
            yield decisions
            return
        over = np.flatnonzero(timeline.high_bytes > problem.target_bytes)
        victim = next((v for op in over.tolist() if (v := walk.victim(op)) is not None), None)
        if victim is None:
            yield nearest
            return
        decisions = {**decisions, victim.storage: RECOMPUTE}
        walk.evict(victim)


class Evictions(Ledger):
    """What is evicted so far, and what a score says to evict next. Op i makes candidate i, with all that is made on the way, of other candidates."""

    def __init__(self, problem: Problem, score: str) -> None:
        view = self.view = problem.view
        self.candidates = [c for c in problem.candidates.values() if c.chain is not None]
        numbers = {c.saved.value: i for i, c in enumerate(self.candidates)}
        chains = [c.chain for c in self.candidates if c.chain is not None]
        reads = [tuple(numbers[v] for v in chain.sources if v in numbers) for chain in chains]
        alone = score == "dtr-local"
        costs = [
            float(view.op_ms[view.value_producer[c.saved.value]] if alone else view.op_ms[[*chain.ops]].sum())
            for c, chain in zip(self.candidates, chains, strict=True)
        ]
        every = range(len(chains))
        size = [c.saved.size_bytes for c in self.candidates]
        super().__init__((reads, [() for _ in every], [(i,) for i in every]), list(every), size, costs)
        last = [min(c.saved.gone_after, view.n - 1) for c in self.candidates]
        self.last_access = view.start_ms[last]
        self.score = scores.SCORES[score]()
        self.score.start(self)

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


def on_graph(name: str) -> Callable[[GraphProblem], Answer]:
    """The rule that evicts by the score of that name, for graphs."""
    score = scores.SCORES[name]

    def rule(problem: GraphProblem) -> Answer:
        try:
            runs = Engine(problem.graph, problem.budget_bytes, score()).plan()
        except Stuck:
            peak, runs = smallest_peak(problem, score)
            if peak > problem.budget_bytes:
                raise problem.not_below(peak) from None
        return Answer(steps=steps_of_runs(problem.graph, runs))

    rule.__doc__ = f"{WORDS[name]}."
    return rule


def smallest_peak(problem: GraphProblem, score: type[Score], probes: int = 6) -> tuple[int, list[int]]:
    """Smallest peak that the rule reaches, by bisection of the budget, and its runs (the rules are not monotone)."""
    graph = problem.graph
    best = plain_runs(graph)
    peak = high = peak_of_runs(graph, best)
    low = problem.budget_bytes
    for _ in range(probes):
        middle = (low + high) // 2
        try:
            runs = Engine(graph, middle, score()).plan()
        except Stuck:
            low = middle
            continue
        high = middle
        if peak_of_runs(graph, runs) < peak:
            best, peak = runs, peak_of_runs(graph, runs)
    return peak, best


for _name in WORDS:
    _made = strategy(
        _name,
        paper="Kirisame et al. 2021, Dynamic Tensor Rematerialization",
        needs=REPLAYABLE,
        allows=RECOMPUTES,
        also=("megengine",) if _name == "dtr-megengine" else (),
    )
    _made.graphs(on_graph(_name))
    if _name.startswith("dtr"):
        _made.profiles(partial(evicted, score=_name))
