"""Decisions for an iteration of alike rounds: planned for one round of each kind, told to all of its kind, mended round by round.

One round of each kind, whose ops take the means over its kind, is an iteration of its own (`round_trace`), which is planned first. What it decides
is decided in every round. Rounds differ in their times, so that here and there a copy comes too late: such a round is mended by itself,
as its own small problem, and so is every round improved by large-neighbourhood moves while there is time. The whole is
judged by the simulator before any plan leaves.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from memopt.advisors.clock import now
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem, may_act_on
from memopt.advisors.profiles.round_trace import trace_of
from memopt.advisors.profiles.rounds import Round
from memopt.advisors.profiles.search import Plan, Search
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.decision import RECOMPUTE, Decision
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView

_SHARE_FOR_KINDS = 0.4
"""Of the time limit."""
_PASSES = 4
"""Judgements of the whole, after each of which the rounds that do not fit are mended."""
_ANEW_S = 1.0
"""For a round that mending does not make fit."""
_LEAST_S = 0.1
"""For planning a round anew."""
_MOVES = 12
"""Large-neighbourhood moves on a round before the next one has its turn."""

Solve = Callable[[Problem, float], Decisions]
"""Plans a problem within so many seconds."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rounds as a problem of their own."""

    problem: Problem
    storages: list[int]
    """Of the whole, by storage of the part."""
    number: dict[int, int]
    """The other way."""

    def inner(self, decisions: Decisions) -> Decisions:
        """Those that are about the part; prefetches are to be placed anew."""
        return {
            self.number[storage]: replace(decision, prefetch_op=-1)
            for storage, decision in decisions.items()
            if storage in self.number
        }

    def outer(self, decisions: Decisions) -> Decisions:
        """In the numbers of the whole; prefetches are to be placed anew."""
        return {self.storages[s]: replace(decision, prefetch_op=-1) for s, decision in decisions.items()}


class ByRounds:
    """The rounds of one problem, and the best decisions for them so far."""

    def __init__(self, problem: Problem, kinds: list[list[Round]], time_limit_s: float, solve: Solve) -> None:
        self.problem, self.kinds, self.solve = problem, kinds, solve
        self.time_limit_s = time_limit_s
        self.deadline = now() + time_limit_s
        self.rounds = sorted((each for kind in kinds for each in kind), key=lambda each: each.begin)
        self.is_over: Callable[[], bool] = lambda: False
        """Is a plan wanted at once?"""
        self.best: Plan | None = None
        self.decisions: Decisions = {}
        """The last that were judged."""
        self._parts: dict[int, Part] = {}
        self._random = random.Random(0)

    @cached_property
    def one_of_each(self) -> Part:
        """The first round of each kind, whose ops take the means of its kind: what an op costs in all of them is so often that."""
        us = np.array(self.problem.view.trace.ops.time_us, dtype=np.float64)
        chosen = sorted(((kind[0], kind) for kind in self.kinds), key=lambda pair: pair[0].begin)
        times = [np.mean([us[each.begin : each.end] for each in kind], axis=0) for _, kind in chosen]
        return self._part([one for one, _ in chosen], np.concatenate(times).tolist())

    def _part(self, rounds: list[Round], time_us: list[float]) -> Part:
        whole = self.problem
        trace, storages = trace_of(whole.view, rounds, time_us)
        view = TraceView(trace)
        simulator = Simulator(view, whole.device)
        problem = Problem(
            view, simulator, whole.budget_bytes, whole.allow, time_limit_s=whole.time_limit_s, part_of=whole
        )
        return Part(problem, storages, {storage: number for number, storage in enumerate(storages)})

    def alone(self, each: Round) -> Part:
        """One round as a problem of its own."""
        if each.begin not in self._parts:
            times = self.problem.view.trace.ops.time_us[each.begin : each.end]
            self._parts[each.begin] = self._part([each], times)
        return self._parts[each.begin]

    def plan(self) -> None:
        """All of it. Raises `BudgetInfeasible` when there is no plan for one round of each kind."""
        self.unfold(self.solve(self.one_of_each.problem, _SHARE_FOR_KINDS * self.time_limit_s))
        self.improve()

    def unfold(self, found: Decisions) -> None:
        """Decide for every round what was decided for the one of its kind, and mend those that do not fit so."""
        told = self.one_of_each.outer(found)
        decisions: Decisions = {}
        for kind in self.kinds:
            for place, storage in enumerate(kind[0].storages):
                if storage in told:
                    for other in kind:
                        self._decide(other.storages[place], told[storage], decisions)
        self._settle(decisions)

    def _decide(self, storage: int, decision: Decision, decisions: Decisions) -> None:
        """What holds a tensor encoded depends on its own bytes and times."""
        view = self.problem.view
        saved = view.saved.get(storage)
        if saved is None or not may_act_on(view, saved):
            return
        if decision.codec:
            candidate = self.problem.candidate(storage)
            if candidate is None or candidate.codec is None:
                return
            decision = candidate.codec.decision
        if decision.early and storage not in view.early:
            decision = RECOMPUTE
        decisions[storage] = decision

    def _settle(self, decisions: Decisions) -> None:
        """Judge the whole; mend the rounds that do not fit, aiming lower by what they missed the target by."""
        problem = self.problem
        aims: dict[int, int] = {}
        for _ in range(_PASSES):
            self.decisions = placed = place_prefetches(problem, decisions)
            timeline = problem.run(placed)
            if problem.fits(timeline):
                if self.best is None or timeline.step_ms < self.best.cost_ms:
                    self.best = Plan(placed, timeline, timeline.step_ms)
                return
            for each in self.rounds:
                over = int(timeline.high_bytes[each.begin : each.end].max(initial=0)) - problem.target_bytes
                if over > 0:
                    aim = aims.get(each.begin, problem.target_bytes + over) - over
                    aims[each.begin] = aim
                    self._mend(each, decisions, aim)

    def _mend(self, each: Round, decisions: Decisions, target_bytes: int) -> None:
        """Change the decisions about one round until it alone keeps to the target."""
        part = self.alone(each)
        search = Search(part.problem.with_target(target_bytes), now() + self.problem.time_limit_s)
        plan = search.mend(search.judge(part.inner(decisions)))
        if search.fits(plan):
            plan = search.prune(plan)
        else:
            with contextlib.suppress(BudgetInfeasible):
                plan = search.judge(self.solve(search.problem, _ANEW_S))
        self._replace(part, decisions, plan)
        part.problem.forget()

    def _replace(self, part: Part, decisions: Decisions, plan: Plan) -> None:
        for storage in part.storages:
            decisions.pop(storage, None)
        decisions.update(part.outer(plan.decisions))

    def improve(self) -> None:
        """Improve each round by itself until the time is up: planned anew where there is time for that, then torn and mended."""
        each_s = (self.deadline - now()) / len(self.rounds)
        if each_s >= _LEAST_S:
            self._improve(lambda part, best: self._anew(part, best, each_s))
        while self._has_time and self._improve(self._torn):
            pass

    @property
    def _has_time(self) -> bool:
        return now() < self.deadline and not self.is_over()

    def _improve(self, better: Callable[[Part, Plan], Plan]) -> bool:
        """Whether the whole gained from what `better` makes of the plan of each round."""
        before = self.best
        if before is None:
            return False
        decisions = dict(before.decisions)
        for each in self._random.sample(self.rounds, len(self.rounds)):
            if not self._has_time:
                break
            part = self.alone(each)
            search = Search(part.problem, self.deadline)
            plan = search.judge(part.inner(decisions))
            if search.fits(plan):
                self._replace(part, decisions, better(part, plan))
            part.problem.forget()
        self._settle(decisions)
        return self.best is not before

    def _anew(self, part: Part, best: Plan, seconds: float) -> Plan:
        with contextlib.suppress(BudgetInfeasible):
            search = Search(part.problem, self.deadline)
            plan = search.as_decided(self.solve(part.problem, seconds))
            return plan if search.better(plan, best) else best
        return best

    def _torn(self, part: Part, best: Plan) -> Plan:
        search = Search(part.problem, self.deadline, seed=self._random.randrange(2**30))
        for _ in range(_MOVES):
            plan = search.tear(best)
            best = plan if search.better(plan, best) else best
        return best
