"""One run of `auto` on a graph as a whole, in stages that each leave the best plan so far in hand.

A first valid plan, the offline greedy, the bound, then with or without a link what `auto` tells.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.bound_with_copies import Linked
from memopt.advisors.graphs.bounds.exact import Proof, Relaxed, Start, prove
from memopt.advisors.graphs.bounds.moments import overhead_bound
from memopt.advisors.graphs.bounds.stages import build, solve
from memopt.advisors.graphs.judge import InvalidSchedule
from memopt.advisors.graphs.problem import Answer, GraphProblem, usual_s
from memopt.advisors.graphs.runs import floor_bytes, peak_of_runs, plain_runs, rerun_ms, steps_of_runs
from memopt.advisors.graphs.schedule import FREE, RUN, Step
from memopt.advisors.graphs.search.blocking_swaps import Waiting
from memopt.advisors.graphs.search.evolve import Evolution
from memopt.advisors.graphs.search.lanes import Lanes
from memopt.advisors.graphs.search.least import least_memory, lowest_peak
from memopt.advisors.graphs.search.neighbourhood import Search
from memopt.advisors.graphs.search.starts import LARGE, first_plan, starts

log = logging.getLogger(__name__)

STARTS = 3
"""So many of the best starts are searched from: fewer would all be alike, more would each have too little time."""
SLOW = 150
"""With fewer iterations than this in a slice, one long search is worth more than several."""
QUICK = 800
"""With fewer than this in the first few slices, one long search is worth more than crossing."""
FEW = 300
"""Above so many ops, one long search is worth more where copies make each move dearer."""
LONG = 1000
"""Above so many ops there is time for about a thousand moves: one search, that hardly ever accepts what is dearer."""
WARM, HEAT, COOL = 0.002, 0.001, 0.0005
LAST_RESORT = 4.0
"""Of the usual time, until a refusal."""
FIRST_S = 0.4
"""So long the quick rules have for a first plan of a long graph."""
GREEDY_FIRST = 0.7
"""Of the time that is left, for the offline greedy where no rule has found a plan."""
PROOF, PROOF_OF_LONG = 0.2, 0.15
"""Of the time, for a bound; on long graphs."""
SMALL = 64
"""HiGHS comes close to the optimum of Checkmate's program for so many ops, in seconds."""
ROUND, GAIN, PATIENCE = 0.75, 0.001, 4
"""What lies beyond the usual time is searched in rounds of that share of it, until so many in a row do not take away so much of the overhead."""
LEAST_S = 0.5
"""HiGHS is not asked for less than that."""
LEAST = 0.15
"""Of the time until the last resort, or of the limit once it is up, for the planner of little memory."""
LEAST_MEMORY_S = 1.0
"""At most, for that."""
PROGRAM, PROGRAM_FIRST = 0.5, 0.3
"""Of the time that is left, for that; where there is no valid plan yet."""
CLOSE = 1e-5
"""A plan whose overhead is this close to the bound ends the search."""
GREEDY = ((0.0, 0.5), (0.0, 1.0), (0.0, 0.0), (0.3, 0.5), (0.3, 1.0), (0.15, 0.5), (0.15, 1.0))
"""Noise and breadth of the greedy starts."""

LENT = ((1.0, 0.0), (0.8, 0.3))
"""How far swaps fill the out lane in the starts that begin with them, and the noise of their choice."""


class AutoPlan:
    """The state of one `auto` run; each stage leaves the best plan so far in `search`."""

    def __init__(self, problem: GraphProblem) -> None:
        self.problem = problem
        self.bound = 0.0
        self.stats: dict[str, float | int | str] = {}
        self.found: list[tuple[float, list[Step]]] = []
        """Cost and steps of valid plans that the search does not hold."""
        self.waiting = Waiting(problem)
        self.proof = Proof()

    @cached_property
    def search(self) -> Search:
        """The search, which takes a while to make for a large graph."""
        problem = self.problem
        lanes = Lanes(problem.graph, problem.out_gbps, problem.in_gbps) if problem.may_swap else None
        found = Search(
            problem.graph,
            plain_runs(problem.graph),
            problem.budget_bytes,
            lanes=lanes,
            replays=problem.may_recompute,
        )
        found.deadline = problem.until
        return found

    @cached_property
    def evolution(self) -> Evolution:
        """Its population."""
        return Evolution(self.search)

    @property
    def is_long(self) -> bool:
        """Whether time is short."""
        return self.problem.graph.op_count > LONG

    def plan(self, insist_until: float = 0.0) -> None:
        """All stages, until the time is up; where there is no valid plan then, it is looked for until `insist_until` at least."""
        begin = now()
        left = self.problem.until - begin
        small = self.problem.graph.op_count <= LARGE
        self.last_resort = min(begin + (LAST_RESORT * left if small else left), self.problem.latest)
        self.last_resort = max(self.last_resort, insist_until)
        self._secure(begin + (max(0.1 * left, FIRST_S if self.is_long else 0.0) if small else 0.3 * left))
        self.bound = overhead_bound(self.problem)
        if not self.is_long or "first_s" not in self.stats:
            self._greedy_start(begin + 0.12 * left)
            self._note_first()
        if self.problem.may_recompute:
            proof_s = (PROOF_OF_LONG if self.is_long else PROOF) * left
            self.proof = prove(self.problem, proof_s, Linked if self.problem.may_swap else Relaxed)
            self.bound = max(self.bound, self.proof.bound_ms / max(self.problem.graph.plain_ms, 1e-12))
        enough = self.enough()
        slice_s = max(0.25, left / 10)
        if self.search.lanes:
            self._jointly(slice_s, enough)
            return
        if not self.search.best_over and self.search.best_cost <= enough:
            return
        evolution = self.evolution
        if self.problem.may_recompute:
            self._evolve_starts(evolution, begin + 0.6 * left, slice_s, STARTS)
        if self.search.best_over:
            self._insist(begin)
        if not self.search.best_over:
            self._exactly(self.stage_end(PROGRAM))
        enough = self.enough()
        if self.search.iterations >= QUICK:
            evolution.run(begin + 0.75 * left, slice_s, enough)
        self._finish(enough)

    def go_on_while_it_pays(self, until: float) -> None:
        """Rounds of search until a few gain next to nothing, or the time is up: plans crossed and the best searched from, where a round gained
        nothing (or the graph is long) from the best alone, warmer."""
        search = self.search
        search.deadline = until
        round_s = ROUND * usual_s(self.problem.graph.op_count)
        fruitless = 0
        while (moment := now()) < until and not search.best_over and search.best_cost > self.enough():
            before, stop = search.best_cost, min(until, moment + round_s)
            alone = self.is_long or fruitless % 2 == 1
            if not alone:
                self.evolution.run(moment + 0.7 * (stop - moment), round_s / 10, self.enough())
            search.load_best()
            search.run(stop, self.enough(), WARM if alone else HEAT)
            fruitless = 0 if search.best_cost < (1 - GAIN) * before else fruitless + 1
            if fruitless == PATIENCE:
                return

    def exactly_until(self, until: float) -> None:
        """Let HiGHS go on with the whole graph, where it is small and nothing proves the plan."""
        if not self.search.best_over and self.search.best_cost > self.enough() and not self.search.lanes:
            self._exactly(until)

    def enough(self) -> float:
        """Rerun time (ms) of a plan that need not be improved."""
        return (self.bound + CLOSE) * self.problem.graph.plain_ms

    def go_on(self, start: Answer) -> None:
        """Improve a valid plan with all the time that is left."""
        self.stats.update(start.stats)
        self.bound = max(start.overhead_bound, overhead_bound(self.problem))
        self.found.append(
            (self.problem.replay(start.steps).overhead * self.problem.graph.plain_ms, start.steps)
        )
        if all(verb in (RUN, FREE) for verb, _ in start.steps):
            self.search.load([op for verb, op in start.steps if verb == RUN])
            self.search.polish_all()
            for runs in starts(self.problem, self.stage_end(PROOF)) if self.problem.may_recompute else ():
                self.search.load(runs)
                self.search.polish_all()
                break
            self._finish(self.enough())

    def _note_first(self) -> None:
        """When the first valid plan was there."""
        if not self.search.best_over:
            self.stats.setdefault("first_s", self.problem.elapsed_s)

    def _insist(self, begin: float) -> None:
        """Look for a valid plan until the last resort; improve one for as long as it took to find, within the time limit."""
        search, moment = self.search, now()
        self._least(moment + LEAST * (self.last_resort - moment))
        moment = now()
        self._exactly(moment + PROGRAM_FIRST * (self.last_resort - moment))
        if search.best_over:
            search.load_best()
            search.mend(self.last_resort)
        if not search.best_over:
            self._note_first()
            moment = now()
            until = min(self.problem.latest, max(self.problem.until, moment + (moment - begin)))
            self.problem = replace(self.problem, until=until)

    def _least(self, until: float) -> None:
        """What the planner of little memory makes of it."""
        problem, search = self.problem, self.search
        if problem.may_recompute and (runs := least_memory(problem.graph, problem.budget_bytes, until)):
            search.load(runs)
            search.polish_all()

    def _exactly(self, until: float) -> None:
        """What HiGHS makes of Checkmate's program, where that is small."""
        search, problem = self.search, self.problem
        if problem.graph.op_count > SMALL or not problem.may_recompute or not find_spec("highspy"):
            return
        if until - now() < LEAST_S:
            return
        start = None if search.best_over else search.best_runs
        program = build(problem.graph, problem.budget_bytes)
        runs, bound_ms = solve(replace(problem, until=until), program, start)
        self.bound = max(self.bound, bound_ms / max(problem.graph.plain_ms, 1e-12))
        if runs is not None:
            search.load(runs)
            search.polish_all()

    def _jointly(self, slice_s: float, enough: float) -> None:
        """Reruns and copies together; plans in which runs wait where there is no other."""
        search, problem = self.search, self.problem
        if problem.may_recompute:
            self._starts(self.stage_end(0.2))
            if not search.best_over:
                self._exactly(self.stage_end(0.2))
        self._swap(now() + slice_s)
        evolution = self.evolution
        if search.best_over:
            self.waiting.try_peers(self.stage_end(0.3))
            if problem.may_recompute:
                self._evolve_starts(evolution, self.last_resort, slice_s, 1)
            search.load_best()
            search.convert(now() + slice_s)
            if search.best_over:
                self.waiting.climb(problem.until)
                return
        best = search.best_cost / max(problem.graph.plain_ms, 1e-12)
        self.waiting.try_peers(self.stage_end(0.3), best)
        if problem.graph.op_count <= FEW:
            evolution.run(self.stage_end(0.7), slice_s, enough)
        self._finish(enough)

    def _evolve_starts(self, evolution: Evolution, until: float, slice_s: float, most: int) -> None:
        """Search from each of the best few starts for a while."""
        found = self._starts(self.stage_end(0.35))[:most]
        if self.is_long and not self.search.best_over:
            return
        for start in found:
            if now() < until or self.search.best_over:
                evolution.add(*start, now() + slice_s)
            if self.search.iterations < SLOW and not self.search.best_over:
                return

    def _finish(self, enough: float) -> None:
        """One long search from the best plan with all the time that is left."""
        if now() < self.problem.until:
            self.search.load_best()
            heat = COOL if self.is_long else HEAT
            self.search.run(self.problem.until, enough, heat)

    def _secure(self, until: float) -> None:
        """A first valid plan, which costs next to no time."""
        graph = self.problem.graph
        if runs := first_plan(self.problem, until):
            self.stats["first_s"] = self.problem.elapsed_s
            self.found.append((rerun_ms(graph, runs), steps_of_runs(graph, runs)))
            self.search.load(runs)
            self.search.polish_all()

    def _greedy_start(self, until: float) -> None:
        """Plans of the offline greedy."""
        for noise, breadth in GREEDY:
            share = GREEDY_FIRST if self.is_long and self.search.best_over else 0.4
            self.search.greedy(noise, breadth, self.stage_end(0.1 if self.search.lanes else share))
            if now() > until:
                return

    def stage_end(self, share: float) -> float:
        """The moment at which `share` of what is left will be used up."""
        moment = now()
        return moment + share * max(0.0, self.problem.until - moment)

    def _starts(self, until: float) -> list[Start]:
        """The best few polished plans: of what was found so far, the proof's, the online rules' and the segments'."""
        search = self.search
        found = [(search.best_over, search.best_cost, (search.best_runs, search.best_swaps))]
        most_ms = math.inf if search.best_over else search.best_cost
        until_starts = self.stage_end(0.15 if search.lanes else 0.3)
        for number, runs in enumerate(starts(self.problem, until_starts, most_ms)):
            if number >= STARTS and now() > until:
                break
            search.load(runs)
            if not search.overflow():
                search.polish_all()
                found.append(self._valued())
            elif not search.best_over:
                break
            else:
                found.append(self._pressed((runs, frozenset())))
        found += [self._pressed(start) for start in self.proof.starts]
        found.sort(key=lambda each: each[:2])
        valid = sum(not over for over, _, _ in found)
        return [start for _, _, start in found[: max(1, min(STARTS, valid))]]

    def _pressed(self, start: Start) -> tuple[int, float, Start]:
        search = self.search
        search.load(*start)
        search.polish_all()
        search.press(self.stage_end(0.1))
        search.polish_all()
        return self._valued()

    def _valued(self) -> tuple[int, float, Start]:
        search = self.search
        swaps = frozenset(search.lanes.swaps) if search.lanes else frozenset()
        return search.overflow(), search.state.cost, (search.state.runs(), swaps)

    def _swap(self, until: float) -> None:
        """Starts with swaps: from the best plan without, and from the plain sequence with swaps first."""
        search = self.search
        search.load_best()
        search.convert(until)
        for share, noise in LENT:
            search.lend(share, noise, until)
            search.convert(until)
        for noise, breadth in GREEDY[:6]:
            search.greedy(noise, breadth, until, swap_first=1.0)
            search.convert(until)
            if now() > until:
                break

    def answer(self) -> Answer:
        """The best plan that the judge accepts; raises `BudgetInfeasible` when none was found."""
        problem, search = self.problem, self.search
        self.stats["iterations"] = search.iterations
        found = list(self.found)
        if self.waiting.best:
            found.append((self.waiting.best[0] * problem.graph.plain_ms, self.waiting.best[1]))
        if not search.best_over:
            found.append((search.best_cost, self._steps()))
        for _, steps in sorted(found, key=lambda item: item[0]):
            if self._holds(steps):
                return Answer(steps=steps, overhead_bound=self.bound, stats=self.stats)
        if found:
            for runs in starts(problem, now() + 10):
                if self._holds(steps := steps_of_runs(problem.graph, runs)):
                    return Answer(steps=steps, overhead_bound=self.bound, stats=self.stats)
        for runs in self._without_a_clock():
            if self._holds(steps := steps_of_runs(problem.graph, runs)):
                return Answer(steps=steps, overhead_bound=self.bound, stats=self.stats)
        raise problem.not_below(max(self.smallest_peak(), problem.budget_bytes + 1))

    def _without_a_clock(self) -> Iterator[list[int]]:
        """What every quick rule makes of a graph on which it takes milliseconds, so that nothing is refused for want of time."""
        graph, budget_bytes = self.problem.graph, self.problem.budget_bytes
        if self.problem.may_recompute and graph.op_count <= LARGE:
            if runs := first_plan(replace(self.problem, until=math.inf), math.inf):
                yield runs
            if runs := least_memory(graph, budget_bytes, now() + LEAST_MEMORY_S):
                yield runs

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
        """Smallest peak reached without meeting the budget, or by the planner of little memory above it."""
        problem = self.problem
        self.search.load_best()
        smallest = min(int(self.search.state.memory.max()), self.waiting.smallest_bytes)
        if problem.may_recompute:
            low = max(problem.budget_bytes + 1, floor_bytes(problem.graph, swap=problem.may_swap)[0])
            most_s = min(LEAST_MEMORY_S, LEAST * (problem.latest - problem.begin))
            runs = lowest_peak(problem.graph, low, smallest, now() + most_s)
            smallest = peak_of_runs(problem.graph, runs) if runs else smallest
        return smallest
