"""The default planner: a portfolio of starts, then search, jointly over keep, swap, recompute, compress and drop.

Starts are the plans of the published strategies and greedy constructions (bytes above the target that go, a millisecond that
is paid, with several exponents). Each is mended until it fits and pruned; then large-neighbourhood moves on the best until the
time limit. Anytime: Ctrl-C keeps the best so far. Never worse than the strategies it starts from, since their plans
are among the starts and are judged by the same simulator. Optimal (under the simulator, for the options there are) only for
problems small enough to try every combination; no bound on the step time is claimed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

from memopt.advisors.blockers import infeasible
from memopt.advisors.capuchin import capuchin_picks, shortest_fitting
from memopt.advisors.problem import Decisions, Problem
from memopt.advisors.search import Plan, Search
from memopt.advisors.sublinear import sublinear_plans

TIME_LIMIT_S = 8.0
_ALL = 1024
"""Problems with at most this many combinations of options are searched completely."""
_STALLED = 160
"""Moves without an improvement after which the search ends early."""


class Auto:
    name = "auto"
    paper = "memopt: portfolio of the others, greedy constructions and large-neighbourhood search"
    needs = "nothing in particular"
    allows = frozenset({"swap-host", "swap-disk", "recompute", "compress"})

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.time_limit_s = time_limit_s

    def plan(self, problem: Problem, /) -> Decisions:
        search = Search(problem, time.monotonic() + self.time_limit_s)
        best = search.judge({})
        try:
            for plan in self._improving(search, best):
                best = plan
        except KeyboardInterrupt:
            if not search.fits(best):
                raise
        if not search.fits(best):
            raise infeasible(problem, best.decisions)
        return best.decisions

    def _improving(self, search: Search, best: Plan) -> Iterator[Plan]:
        """Better and better plans."""
        if math.prod(1 + len(c.options) for c in search.problem.candidates.values()) <= _ALL:
            for plan in every_plan(search):
                if search.better(plan, best):
                    best = plan
                    yield best
            return
        for decisions in starts(search):
            plan = search.judge(decisions)
            if search.better(plan, best):
                best = plan
                yield best
            for polished in polish(search, plan):
                if search.better(polished, best):
                    best = polished
                    yield best
        stalled = 0
        while stalled < _STALLED and not search.is_over and best.decisions:
            plan = search.tear(best)
            stalled += 1
            if search.better(plan, best):
                best, stalled = plan, 0
                yield best
        if best.decisions and not search.is_over:
            plan = search.exchange(best)
            if search.better(plan, best):
                yield plan


def every_plan(search: Search) -> Iterator[Plan]:
    """All combinations of options: only for a handful of candidates, where the best of them is the optimum."""
    candidates = list(search.problem.candidates.values())
    for options in itertools.product(*((None, *c.options) for c in candidates)):
        pairs = zip(candidates, options, strict=True)
        yield search.judge({c.storage: option for c, option in pairs if option is not None})


def starts(search: Search) -> Iterator[Decisions]:
    """Where to search from: what is free, greedy constructions, and the plans of the published strategies."""
    problem = search.problem
    free = {
        c.storage: option
        for c in problem.candidates.values()
        for option in c.options
        if option.kind == "drop" and option.decoded_bytes < c.saved.size_bytes
    }
    yield free
    best, nearest = shortest_fitting(problem, capuchin_picks(problem))
    yield best if best is not None else nearest
    plans = [(problem.run(decisions), decisions) for decisions in sublinear_plans(problem)]
    fitting = sorted((p for p in plans if problem.fits(p[0])), key=lambda p: p[0].step_ms)
    yield from (decisions for _, decisions in fitting[:2])
    plans.sort(key=lambda p: p[0].peak_bytes)
    yield from (decisions for _, decisions in plans[:2])
    plans.sort(key=lambda p: p[0].peak_bytes * p[0].step_ms)
    yield from (decisions | free for _, decisions in plans[:1])


def polish(search: Search, plan: Plan) -> Iterator[Plan]:
    """What mending and pruning make of a start."""
    if search.fits(plan):
        yield search.prune(plan)
        return
    for power in (1.0, 0.5, 2.0):
        mended = search.mend(plan, power=power)
        yield mended
        if search.fits(mended):
            yield search.prune(mended)
        if search.is_over:
            return
