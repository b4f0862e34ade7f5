"""What every graph strategy gets (a problem) and gives (steps), and the one door through which a plan leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from memopt.advisors.clock import now
from memopt.advisors.graphs.graph import Graph
from memopt.advisors.graphs.judge import Outcome, replay
from memopt.advisors.graphs.runs import (
    floor_bytes,
    peak_of_runs,
    plain_peak,
    plain_runs,
    rerun_ms,
    steps_of_runs,
)
from memopt.advisors.graphs.schedule import Schedule, Step
from memopt.errors import BudgetInfeasible
from memopt.units import format_bytes

RECOMPUTE = "recompute"
SWAP = "swap"
EVERYTHING = frozenset({RECOMPUTE, SWAP})


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem:
    """A graph, a budget and what is allowed. `until` is the moment (`clock.now`) at which to answer; where no plan has been found
    by then, the search may go on until `latest`. `begin`: when planning began."""

    graph: Graph
    budget_bytes: int
    out_gbps: float = 0.0
    in_gbps: float = 0.0
    allow: frozenset[str] = EVERYTHING
    until: float = field(default_factory=lambda: now() + 20.0)
    latest: float = math.inf
    begin: float = field(default_factory=lambda: now())

    @property
    def may_swap(self) -> bool:
        """Whether there is a link to the host that may be used."""
        return SWAP in self.allow and self.out_gbps > 0 and self.in_gbps > 0

    @property
    def may_recompute(self) -> bool:
        """Whether ops may run again."""
        return RECOMPUTE in self.allow

    @property
    def may(self) -> frozenset[str]:
        """The kinds of action that a plan may choose."""
        return frozenset(
            ({RECOMPUTE} if self.may_recompute else set()) | ({SWAP} if self.may_swap else set())
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds of planning so far, to the millisecond."""
        return round(now() - self.begin, 3)

    def moment(self, share: float) -> float:
        """The moment at which `share` of the time that is left now will be used up."""
        moment = now()
        return moment + share * max(0.0, self.until - moment)

    def replay(self, steps: list[Step]) -> Outcome:
        """Judge `steps` under this budget and link."""
        return replay(self.graph, steps, self.budget_bytes, self.out_gbps, self.in_gbps)

    def not_below(self, min_peak_bytes: int) -> BudgetInfeasible:
        """The error of a strategy whose smallest peak is `min_peak_bytes`: what no plan can go below, and where."""
        floor, op = floor_bytes(self.graph, swap=self.may_swap)
        where = self.graph.op_label(op) if op >= 0 else "what must be on the device at the end"
        blockers = [f"no plan can go below {format_bytes(floor)}: {where}"]
        if self.graph.resident_bytes:
            blockers.append(f"resident tensors take {format_bytes(self.graph.resident_bytes)}")
        return BudgetInfeasible(self.budget_bytes, max(min_peak_bytes, floor), tuple(blockers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Steps that meet the budget, and what the strategy has to tell about its search."""

    steps: list[Step]
    overhead_bound: float = 0.0
    stats: dict[str, float | int | str] = field(default_factory=dict)


def usual_s(op_count: int) -> float:
    """Seconds of search that are worth their wait: 4 for up to 3,000 ops, 17 for 8,000, 60 for 100,000."""
    return float(np.interp(op_count, (3000, 8000, 100_000), (4.0, 17.0, 60.0)))


def finish(problem: GraphProblem, answer: Answer, strategy: str) -> Schedule:
    """Judge an answer and make the schedule of it; `InvalidSchedule` here is a bug of the strategy."""
    outcome = problem.replay(answer.steps)
    floor, _ = floor_bytes(problem.graph, swap=problem.may_swap)
    return Schedule(
        graph_name=problem.graph.name,
        strategy=strategy,
        budget_bytes=problem.budget_bytes,
        out_gbps=problem.out_gbps,
        in_gbps=problem.in_gbps,
        steps=answer.steps,
        overhead=outcome.overhead,
        peak_bytes=outcome.peak_bytes,
        recompute_ms=outcome.rerun_ms,
        exposed_ms=outcome.exposed_ms,
        floor_bytes=floor,
        overhead_bound=min(answer.overhead_bound, outcome.overhead),
        stats=answer.stats,
    )


def plain_answer(problem: GraphProblem) -> Answer | None:
    """The plan that does nothing, when it meets the budget."""
    if plain_peak(problem.graph) > problem.budget_bytes:
        return None
    return Answer(steps=steps_of_runs(problem.graph, plain_runs(problem.graph)))


def cheapest_runs(problem: GraphProblem, plans: Iterable[list[int]]) -> Answer:
    """The cheapest of some run sequences that meets the budget; `BudgetInfeasible` with the smallest peak of them all."""
    graph = problem.graph
    smallest = plain_peak(graph)
    best: tuple[float, list[int]] | None = None
    for runs in plans:
        peak = peak_of_runs(graph, runs)
        smallest = min(smallest, peak)
        cost = rerun_ms(graph, runs)
        if peak <= problem.budget_bytes and (best is None or cost < best[0]):
            best = (cost, runs)
    if best is None:
        raise problem.not_below(smallest)
    return Answer(steps=steps_of_runs(graph, best[1]))
