"""`auto` for graphs: portfolio, then exact-delta large-neighbourhood search over reruns and swaps together, anytime.

1. Every online rule (`graph_scores`), Chen's segments and an offline greedy (evict from the plain sequence by relief per recompute time,
   with exact deltas) give starts; the first valid plan is there in milliseconds.
2. The best start of each family is searched for a while (`graph_search`), then the better one until the time is up or the bound is met.
3. With a link, reruns are traded for swaps that the two lanes can hide (`graph_lanes`); the plan without swaps stays in hand,
   so a link never makes a plan worse. Ctrl-C keeps the best.
It is not optimal in general: `overhead_bound` says how far off it can be at most.
"""

from __future__ import annotations

import logging
import time

from memopt.advisors.graph import Graph
from memopt.advisors.graph_bounds import overhead_bound
from memopt.advisors.graph_engine import Engine, Stuck
from memopt.advisors.graph_evolve import Evolution
from memopt.advisors.graph_exact import Proof, prove
from memopt.advisors.graph_lanes import Lanes
from memopt.advisors.graph_problem import Answer, GraphProblem, infeasible, plain_answer
from memopt.advisors.graph_runs import floor_bytes, peak_of_runs, plain_runs, rerun_ms, steps_of_runs
from memopt.advisors.graph_scores import SCORES
from memopt.advisors.graph_search import Search
from memopt.advisors.graph_segments import Forward, greedy_cuts, runs_keeping, sqrt_cuts
from memopt.advisors.graph_waiting import Waiting
from memopt.advisors.schedule import Step
from memopt.advisors.schedule_sim import InvalidSchedule

log = logging.getLogger(__name__)

PORTFOLIO = ("msps", "dtr-local", "next-use", "dtr", "dtr-eqclass", "size", "lru", "megengine", "belady")
STARTS = 3
SLOW = 150
"""With fewer iterations than this in a slice, one long search is worth more than several."""
FEW = 200
"""Above so many ops, one long search is worth more when copies make each move dearer."""
PROOF = 0.2
CLOSE = 1e-5
"""A plan whose overhead is this close to the bound ends the search."""
LOOSER = 1.25
GREEDY = ((0.0, 0.5), (0.0, 1.0), (0.0, 0.0), (0.3, 0.5), (0.3, 1.0), (0.15, 0.5), (0.15, 1.0))
"""Noise and breadth of the greedy starts."""


class AutoPlan:
    """The state of one `auto` run; each stage leaves the best plan so far in `search`."""

    def __init__(self, problem: GraphProblem) -> None:
        self.problem = problem
        self.bound = 0.0
        lanes = Lanes(problem.graph, problem.out_gbps, problem.in_gbps) if problem.may_swap else None
        self.search = Search(
            problem.graph,
            plain_runs(problem.graph),
            problem.budget_bytes,
            lanes=lanes,
            replays=problem.may_recompute,
        )
        self.search.deadline = problem.until
        self.stats: dict[str, float | int | str] = {}
        self.waiting = Waiting(problem)
        self.proof = Proof()

    def plan(self) -> None:
        """All stages, until the time is up."""
        begin = time.monotonic()
        left = self.problem.until - begin
        self.last_resort = begin + 3 * left
        self.bound = overhead_bound(self.problem)
        if self.problem.may_recompute:
            self._secure(begin + 0.05 * left)
        self._greedy_start(begin + 0.08 * left)
        self.stats["first_s"] = round(time.monotonic() - begin, 3)
        if self.problem.may_recompute and not self.problem.may_swap:
            self.proof = prove(self.problem, PROOF * left)
            self.bound = max(self.bound, self.proof.bound_ms / max(self.problem.graph.plain_ms, 1e-12))
        enough = (self.bound + CLOSE) * self.problem.graph.plain_ms
        slice_s = max(0.25, left / 10)
        if self.search.lanes:
            self._swap(time.monotonic() + slice_s)
        if not self.search.best_over and self.search.best_cost <= enough:
            return
        evolution = Evolution(self.search)
        if self.problem.may_recompute:
            for runs in self._starts(self.stage_end(0.25))[: 1 if self.search.lanes else STARTS]:
                if time.monotonic() < begin + 0.6 * left or self.search.best_over:
                    evolution.add(runs, frozenset(), time.monotonic() + slice_s)
                if self.search.iterations < SLOW and not self.search.best_over:
                    break
        if self.search.lanes:
            self._swap(time.monotonic() + slice_s)
            self.waiting.try_peers(self.last_resort if self.search.best_over else time.monotonic() + slice_s)
            if self.search.best_over:
                self.waiting.climb(self.problem.until)
                return
            evolution.add(self.search.best_runs, self.search.best_swaps, time.monotonic() + slice_s)
        elif self.search.best_over:
            self.search.load_best()
            self.search.mend(self.last_resort)
        if self.search.iterations >= SLOW and not (self.search.lanes and self.problem.graph.op_count > FEW):
            evolution.run(begin + 0.75 * left, slice_s, enough)
        if time.monotonic() < self.problem.until:
            self.search.load_best()
            self.search.run(self.problem.until, enough)

    def _secure(self, until: float) -> None:
        """A first valid plan from a few segment plans, which cost next to nothing."""
        forward = Forward(self.problem.graph)
        for keep in greedy_cuts(forward, 6)[1:]:
            runs = runs_keeping(forward, keep)
            if peak_of_runs(self.problem.graph, runs) <= self.problem.budget_bytes:
                self.search.load(runs)
                self.search.polish_all()
                return
            if time.monotonic() > until:
                return

    def _greedy_start(self, until: float) -> None:
        """Plans of the offline greedy."""
        for noise, breadth in GREEDY:
            self.search.greedy(noise, breadth, self.stage_end(0.4))
            if time.monotonic() > until:
                return

    def stage_end(self, share: float) -> float:
        """The moment at which `share` of what is left will be used up."""
        now = time.monotonic()
        return now + share * max(0.0, self.problem.until - now)

    def _starts(self, until: float) -> list[list[int]]:
        """The best few polished run sequences: of what was found so far, the proof's, the online rules' and the segments'."""
        search = self.search
        found = [(search.best_over, search.best_cost, search.best_runs)]
        for runs in starts(self.problem, self.stage_end(0.12)):
            search.load(runs)
            if not search.overflow():
                search.polish_all()
                found.append((0, search.state.cost, search.state.runs()))
            elif not search.best_over or time.monotonic() > until:
                break
            else:
                found.append(self._pressed(runs))
        found += [self._pressed(runs) for runs in self.proof.runs]
        found.sort(key=lambda each: each[:2])
        valid = sum(not over for over, _, _ in found)
        return [runs for _, _, runs in found[: max(1, min(STARTS, valid))]]

    def _pressed(self, runs: list[int]) -> tuple[int, float, list[int]]:
        search = self.search
        search.load(runs)
        search.polish_all()
        search.press(self.stage_end(0.1))
        search.polish_all()
        return search.overflow(), search.state.cost, search.state.runs()

    def _swap(self, until: float) -> None:
        """Starts with swaps: from the best plan without, and from the plain sequence with swaps first."""
        search = self.search
        search.load_best()
        search.convert(until)
        for noise, breadth in GREEDY[:6]:
            search.greedy(noise, breadth, until, swap_first=1.0)
            search.convert(until)
            if time.monotonic() > until:
                break

    def answer(self) -> Answer:
        """The best plan that the judge accepts; raises `BudgetInfeasible` when none was found."""
        problem, search = self.problem, self.search
        self.stats["iterations"] = search.iterations
        found: list[tuple[float, list[Step]]] = []
        if self.waiting.best:
            found.append((self.waiting.best[0] * problem.graph.plain_ms, self.waiting.best[1]))
        if not search.best_over:
            found.append((search.best_cost, self._steps()))
        for _, steps in sorted(found, key=lambda item: item[0]):
            if self._holds(steps):
                return Answer(steps=steps, overhead_bound=self.bound, stats=self.stats)
        if found:
            for runs in starts(problem, time.monotonic() + 10):
                if self._holds(steps := steps_of_runs(problem.graph, runs)):
                    return Answer(steps=steps, overhead_bound=self.bound, stats=self.stats)
        peak = max(min(self.smallest_peak(), self.waiting.smallest_bytes), problem.budget_bytes + 1)
        raise infeasible(problem, peak)

    def _steps(self) -> list[Step]:
        search = self.search
        search.load_best()
        if search.lanes:
            return search.lanes.steps(search.state)
        return steps_of_runs(self.problem.graph, search.best_runs)

    def _holds(self, steps: list[Step]) -> bool:
        """Whether the judge accepts; a refusal is a bug here, but must not cost the user the plan."""
        try:
            self.problem.replay(steps)
        except InvalidSchedule as refusal:
            log.error("a plan was thrown away: %s", refusal)
            return False
        return True

    def smallest_peak(self) -> int:
        """Smallest peak reached without meeting the budget."""
        self.search.load_best()
        return int(self.search.state.memory.max())


def auto(problem: GraphProblem) -> Answer:
    """The best plan found by `problem.until`."""
    plain = plain_answer(problem)
    if plain is not None:
        return plain
    floor, _ = floor_bytes(problem.graph, swap=problem.may_swap)
    if problem.budget_bytes < floor:
        raise infeasible(problem, smallest_peak(problem, floor))
    work = AutoPlan(problem)
    try:
        work.plan()
    except KeyboardInterrupt:
        work.stats["interrupted"] = 1
    return work.answer()


def smallest_peak(problem: GraphProblem, floor: int) -> int:
    """Smallest peak that a short search at the floor reaches."""
    search = Search(problem.graph, plain_runs(problem.graph), floor, replays=problem.may_recompute)
    begin = time.monotonic()
    search.greedy(0.0, 0.5, begin + 0.25 * (problem.until - begin))
    return int(search.state.memory.max())


def starts(problem: GraphProblem, until: float) -> list[list[int]]:
    """Run sequences of the online rules and of Chen's segments: those that meet the budget, cheapest first; then the others."""
    graph = problem.graph
    found: list[tuple[int, float, list[int]]] = []
    begin = time.monotonic()
    forward = Forward(graph)
    for keep in sqrt_cuts(forward) + greedy_cuts(forward):
        found.append(_valued(graph, problem.budget_bytes, runs_keeping(forward, keep)))
        if time.monotonic() - begin > 0.3 * (until - begin):
            break
    for name in PORTFOLIO:
        for budget_bytes in (problem.budget_bytes, int(LOOSER * problem.budget_bytes)):
            if time.monotonic() > until:
                break
            try:
                runs = Engine(graph, budget_bytes, SCORES[name](), until=until).plan()
            except Stuck:
                continue
            found.append(_valued(graph, problem.budget_bytes, runs))
            break
    return [runs for _, _, runs in sorted(found, key=lambda item: item[:2])]


def _valued(graph: Graph, budget_bytes: int, runs: list[int]) -> tuple[int, float, list[int]]:
    return max(0, peak_of_runs(graph, runs) - budget_bytes), rerun_ms(graph, runs), runs
