"""One run of `auto` on a graph as a whole, in stages that each leave the best plan so far in hand.

A first valid plan, the offline greedy, the bound, then with or without a link what `auto` tells.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.bound_with_copies import Linked
from memopt.advisors.graphs.bounds.exact import Proof, Relaxed, prove
from memopt.advisors.graphs.bounds.moments import overhead_bound
from memopt.advisors.graphs.bounds.stages import build, solve
from memopt.advisors.graphs.problem import Answer, GraphProblem, usual_s
from memopt.advisors.graphs.runs import plain_runs, rerun_ms, steps_of_runs
from memopt.advisors.graphs.schedule import FREE, RUN, Step
from memopt.advisors.graphs.search.accepted import Costed, accepted, lowest_with_little_memory
from memopt.advisors.graphs.search.begin import STARTS, best_starts, start_greedily, start_with_swaps
from memopt.advisors.graphs.search.blocking_swaps import Waiting
from memopt.advisors.graphs.search.evolve import Evolution
from memopt.advisors.graphs.search.lanes import Lanes
from memopt.advisors.graphs.search.least import least_memory
from memopt.advisors.graphs.search.neighbourhood import Search
from memopt.advisors.graphs.search.starts import LARGE, first_plan, starts

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
PROOF, PROOF_OF_LONG = 0.2, 0.15
"""Of the time, for a bound; on long graphs."""
SMALL = 64
"""HiGHS comes close to the optimum of Checkmate's program for so many ops, in seconds."""
ROUND, GAIN, PATIENCE = 0.75, 0.001, 4
"""What lies beyond the usual time is searched in rounds of that share of it, until so many in a row do not take away so much of the overhead."""
LEAST_S = 0.5
"""HiGHS is not asked for less than that."""
LEAST = 0.15
"""Of the time until the last resort, for the planner of little memory."""
PROGRAM, PROGRAM_FIRST = 0.5, 0.3
"""Of the time that is left, for that; where there is no valid plan yet."""
CLOSE = 1e-5
"""A plan whose overhead is this close to the bound ends the search."""


class AutoPlan:
    """The state of one `auto` run; each stage leaves the best plan so far in `search`."""

    def __init__(self, problem: GraphProblem) -> None:
        self.problem = problem
        self.bound = 0.0
        self.stats: dict[str, float | int | str] = {}
        self.found: list[Costed] = []
        """Valid plans that the search does not hold."""
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
            start_greedily(self.problem, self.search, begin + 0.12 * left, insist=self.is_long)
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
            self._exactly(self.problem.moment(PROGRAM))
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
            for runs in (
                starts(self.problem, self.problem.moment(PROOF)) if self.problem.may_recompute else ()
            ):
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
            best_starts(problem, search, self.proof.starts, problem.moment(0.2))
            if not search.best_over:
                self._exactly(self.problem.moment(0.2))
        start_with_swaps(search, now() + slice_s)
        evolution = self.evolution
        if search.best_over:
            self.waiting.try_peers(self.problem.moment(0.3))
            if problem.may_recompute:
                self._evolve_starts(evolution, self.last_resort, slice_s, 1)
            search.load_best()
            search.convert(now() + slice_s)
            if search.best_over:
                self.waiting.climb(problem.until)
                return
        best = search.best_cost / max(problem.graph.plain_ms, 1e-12)
        self.waiting.try_peers(self.problem.moment(0.3), best)
        if problem.graph.op_count <= FEW:
            evolution.run(self.problem.moment(0.7), slice_s, enough)
        self._finish(enough)

    def _evolve_starts(self, evolution: Evolution, until: float, slice_s: float, most: int) -> None:
        """Search from each of the best few starts for a while."""
        problem = self.problem
        found = best_starts(problem, self.search, self.proof.starts, problem.moment(0.35))[:most]
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

    def answer(self) -> Answer:
        """The best plan that the judge accepts; raises `BudgetInfeasible` when none was found."""
        self.stats["iterations"] = self.search.iterations
        steps = accepted(self.problem, self._valid())
        if steps is None:
            raise self.problem.not_below(max(self.smallest_peak(), self.problem.budget_bytes + 1))
        return Answer(steps=steps, overhead_bound=self.bound, stats=self.stats)

    def _valid(self) -> list[Costed]:
        """All that the stages hold to be valid."""
        found = list(self.found)
        if self.waiting.best:
            found.append((self.waiting.best[0] * self.problem.graph.plain_ms, self.waiting.best[1]))
        if not self.search.best_over:
            found.append((self.search.best_cost, self._steps()))
        return found

    def _steps(self) -> list[Step]:
        search = self.search
        search.load_best()
        if search.lanes:
            return search.lanes.steps(search.state)
        return steps_of_runs(self.problem.graph, search.best_runs)

    def smallest_peak(self) -> int:
        """Smallest peak reached without meeting the budget, or by the planner of little memory above it."""
        self.search.load_best()
        reached = min(int(self.search.state.memory.max()), self.waiting.smallest_bytes)
        return lowest_with_little_memory(self.problem, reached)
