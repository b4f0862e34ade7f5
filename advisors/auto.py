"""The default planner: a portfolio of starts, then search, jointly over keep, swap, recompute, compress and drop.

Starts are the plans of the published strategies and greedy constructions (bytes above the target that go, a millisecond that
is paid, with several exponents). Each is mended until it fits and pruned; then large-neighbourhood moves on the best until the
time limit. Anytime: Ctrl-C keeps the best so far. Never worse than the strategies it starts from, since their plans
are among the starts and are judged by the same simulator. Optimal (under the simulator, for the options there are) only for
problems small enough to try every combination; no bound on the step time is claimed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator

from memopt.advisors.autoswap import Autoswap
from memopt.advisors.blockers import infeasible
from memopt.advisors.capuchin import capuchin_picks
from memopt.advisors.dtr import Dtr
from memopt.advisors.flashneuron import Flashneuron
from memopt.advisors.gist import Gist
from memopt.advisors.modnn import Modnn
from memopt.advisors.picks import shortest_fitting
from memopt.advisors.problem import Decisions, OutOfTime, Problem
from memopt.advisors.search import Plan, Search
from memopt.advisors.sentinel import Sentinel
from memopt.advisors.sublinear import sublinear_plans
from memopt.advisors.superneurons import Superneurons
from memopt.advisors.swapadvisor import Swapadvisor
from memopt.advisors.tflms import Tflms
from memopt.advisors.vdnn import Vdnn
from memopt.advisors.vdnn_plus import VdnnPlus
from memopt.errors import BudgetInfeasible

TIME_LIMIT_S = 8.0
_PROMISING = 1.25
"""A start that fits is polished when its step takes at most this many times the best one's."""
_MANY = 400
_SHARE_FOR_SEARCH = 0.5
_SHARE_FOR_STARTS = 0.7
_DESCENT_TRIES = 6
_QUICK = (Autoswap(), Flashneuron(), Tflms(), Sentinel(), Superneurons(), Vdnn("all"), VdnnPlus(), Gist())
_THOROUGH = (Dtr(), Dtr("eqclass"), Dtr("local"), Dtr("megengine"), Modnn(), Swapadvisor())
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
        for plan in self._from_starts(search):
            if search.better(plan, best):
                best = plan
                yield best
        for plan in (best, search.judge({})):
            if not search.fits(best):
                lower = descend(search.until_half(), plan)
                if search.better(lower, best):
                    best = lower
                    yield best
        stalled = 0
        while stalled < _STALLED and not search.is_over and search.fits(best) and best.decisions:
            plan = search.tear(best)
            stalled += 1
            if search.better(plan, best):
                best, stalled = plan, 0
                yield best
        if best.decisions and not search.is_over:
            plan = search.exchange(best)
            if search.better(plan, best):
                yield plan

    def _from_starts(self, search: Search) -> Iterator[Plan]:
        """The starts as they are, and what mending and pruning make of those that are promising."""
        cheapest = math.inf
        hopeless = search.problem.floor_bytes > search.problem.target_bytes
        for decisions in itertools.chain(starts(search), portfolio(search)):
            plan = search.judge(decisions)
            yield plan
            if hopeless or (search.fits(plan) and plan.cost_ms > _PROMISING * cheapest):
                continue
            if not search.fits(plan) and search.share_left < _SHARE_FOR_SEARCH:
                continue
            for polished in polish(search, plan):
                yield polished
                if search.fits(polished):
                    cheapest = min(cheapest, polished.cost_ms)


def every_plan(search: Search) -> Iterator[Plan]:
    """All combinations of options: only for a handful of candidates, where the best of them is the optimum."""
    candidates = list(search.problem.candidates.values())
    for options in itertools.product(*((None, *c.options) for c in candidates)):
        pairs = zip(candidates, options, strict=True)
        yield search.judge({c.storage: option for c, option in pairs if option is not None})


def starts(search: Search) -> Iterator[Decisions]:
    """Where to search from: what is free, and the plans of Capuchin and of sublinear checkpointing."""
    problem = search.problem.limited(search.moment(_SHARE_FOR_STARTS))
    free = {
        c.storage: option
        for c in problem.candidates.values()
        for option in c.options
        if option.kind == "drop" and option.decoded_bytes < c.saved.size_bytes
    }
    yield free
    with contextlib.suppress(OutOfTime):
        best, nearest = shortest_fitting(problem, capuchin_picks(problem))
        yield best if best is not None else nearest
    plans = []
    with contextlib.suppress(OutOfTime):
        for decisions in sublinear_plans(problem):
            plans.append((problem.run(decisions), decisions))
    fitting = sorted((p for p in plans if problem.fits(p[0])), key=lambda p: p[0].step_ms)
    yield from (decisions for _, decisions in fitting[:2])
    plans.sort(key=lambda p: p[0].peak_bytes)
    yield from (decisions for _, decisions in plans[:2])
    plans.sort(key=lambda p: p[0].peak_bytes * p[0].step_ms)
    yield from (decisions | free for _, decisions in plans[:1])


def portfolio(search: Search) -> Iterator[Decisions]:
    """What the other strategies plan, while there is time for them."""
    small = len(search.problem.candidates) <= _MANY
    for strategy in (*_QUICK, *(_THOROUGH if small else ())):
        if search.share_left < _SHARE_FOR_SEARCH:
            return
        if strategy.allows & search.problem.allow:
            limited = search.problem.limited(search.moment(_SHARE_FOR_SEARCH))
            with contextlib.suppress(BudgetInfeasible, OutOfTime):
                yield strategy.plan(limited)


def descend(search: Search, plan: Plan) -> Plan:
    """A plan with a lower and lower peak: the target comes down in small steps, and each is met from the plan before."""
    step = 0.03
    while not search.fits(plan) and not search.is_over and step > 0.001:
        nearer = search.aimed_at(max(search.problem.target_bytes, int(plan.peak_bytes * (1 - step))))
        trial = nearer.mend(plan)
        for _ in range(_DESCENT_TRIES):
            if nearer.fits(trial) or search.is_over:
                break
            trial = nearer.tear(plan, prune=False)
        if nearer.fits(trial):
            plan = trial
        else:
            step /= 2
    return plan


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
