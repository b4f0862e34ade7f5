"""The default planner: a portfolio of starts, then search, jointly over keep, swap, recompute, compress and drop.

Starts are the plans of the published strategies (not SwapAdvisor's: they took time and led nowhere) and greedy constructions
(bytes above the target that go, a millisecond that is paid, with several exponents); where no quick one fits, checkpoints. Each is mended until it fits and pruned;
then large-neighbourhood moves on the best until the time limit. Anytime: Ctrl-C keeps the best so far. Never worse than the
strategies it starts from, since their plans are among the starts and are judged by the same simulator (the slower ones while
there is time). Optimal (under the simulator, for the options there are) for problems small enough to try every combination,
and where the bound of `lower_bound` is met, at which the search ends; elsewhere the bound says how far off a plan can be.
HiGHS, where it is installed, gives the bound and some of the starts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator

from memopt.advisors.clock import OutOfTime, now
from memopt.advisors.profiles.blockers import Reached, infeasible
from memopt.advisors.profiles.by_rounds import ByRounds
from memopt.advisors.profiles.lower_bound import least_step_ms
from memopt.advisors.profiles.problem import TIME_LIMIT_S, Candidate, Decisions, Problem
from memopt.advisors.profiles.rounds import Round, find_kinds
from memopt.advisors.profiles.search import Plan, Search
from memopt.advisors.profiles.starts.checkpoints import (
    best_of,
    last_resorts,
    lightened,
    middle_first,
    swept,
)
from memopt.advisors.profiles.starts.from_graph import graph_plans
from memopt.advisors.profiles.starts.link_price import link_priced_plans
from memopt.advisors.profiles.starts.same_kind import alike_plans
from memopt.advisors.profiles.starts.tightening import answers
from memopt.advisors.registry import find_strategy
from memopt.errors import BudgetInfeasible, NotPossibleHere
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, Decision

_MANY = 400
"""With more candidates, kinds of alike ones are tried first: single ones take too long to weigh."""
_MOST_FOR_SQUARES = 4000
"""With more candidates, Capuchin, whose picks take the square of their number, is left out."""
_SHARE_WITHOUT_A_PLAN = 0.4
"""Of the time limit, after which another search begins where no plan fits yet (`_going_on`)."""
_SHARE_FOR_NOTHING = 0.7
"""Of the time limit, how long that one takes."""
_SHARE_AFTER_GRAPHS = 0.3
_SHARE_FOR_STARTS = 0.45
_SHARE_AFTER_QUICK = 0.6
_SHARE_AFTER_CHECKPOINTS = 0.15
_SHARE_AFTER_LIGHTENED = 0.1
_SHARE_FOR_SEARCH = 0.35
_SHARE_AFTER_THOROUGH = 0.25
"""What is left of the time limit when each of these phases ends at the latest."""
_NEAREST = 4
"""Quick starts that miss the budget by least are mended first."""
_FOR_NEAREST = 2
"""Time limits that this may take where the budget can be met."""
_SHARE_FOR_PROGRAMS = 0.08
_SHARE_FOR_BOUND = 0.12
_SHARE_FOR_GRAPHS = 0.25
"""What these may take of it."""
_LARGE = 8000
"""With more ops than this, an iteration that has rounds is not searched as a whole."""
_DESCENT_TRIES = 6
"""Ways in which a plan is torn to reach the next lower target, before the step down is halved."""
_MET = 1e-5
"""Share above the bound at which a plan is as good as optimal."""
_QUICK = (
    "capuchin",
    "flashneuron",
    "tflms",
    "sentinel",
    "superneurons",
    "vdnn-all",
    "vdnn-conv",
    "vdnn++",
    "gist",
    "rotor",
    "autoswap",
)
"""The quickest first, which Capuchin is for few candidates."""
_THOROUGH = ("modnn", "dtr", "dtr-eqclass", "dtr-local", "dtr-megengine", "autotm")
_ALL = 1024
"""Problems with at most this many combinations of options are searched completely."""
_STALLED = 640
"""Moves without an improvement after which the search ends early. With 160, nets of 40 layers kept plans 0.7 points dearer than with these."""


class Auto:
    """The planner, with a time limit."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S, *, for_steps: int = 0) -> None:
        """`for_steps`: a script waits for the plan, and runs about so many steps under it until there is a better one; 0: none waits."""
        self.time_limit_s, self.for_steps = time_limit_s, for_steps
        self._began = now()
        self.interrupted = False
        """Did Ctrl-C end the last search?"""

    def is_enough(self, extra_ms: float) -> bool:
        """Does a script wait, and has the search taken all of its time, or longer than a plan whose steps take `extra_ms` more costs?"""
        worth_s = min(self.time_limit_s, self._worth_s(extra_ms))
        return bool(self.for_steps) and now() - self._began >= worth_s

    def _worth_s(self, extra_ms: float) -> float:
        return self.for_steps * max(0.0, extra_ms) / 1000

    def plan(self, problem: Problem, /) -> Decisions:
        kinds = find_kinds(problem.view)
        if kinds and (found := self._by_rounds(problem, kinds)) is not None:
            return found
        search = Search(problem, now() + _SHARE_WITHOUT_A_PLAN * self.time_limit_s)
        rest_s = self.time_limit_s - search.seconds
        best = search.judge({})
        small = _is_small(problem)
        hopeless = problem.floor_bytes > problem.target_bytes and not small
        try:
            for plan in self._improving(search, best) if not hopeless else ():
                best = plan
                if rest_s and search.fits(best):
                    search.lengthen(rest_s)
                    rest_s = 0.0
                if self.for_steps and search.fits(best):
                    search.end_within(self._worth_s(best.cost_ms - problem.plain_step_ms))
            if not (search.fits(best) or small):
                best = self._going_on(search, best)
        except KeyboardInterrupt:
            if not search.fits(best):
                raise
            self.interrupted = True
        if not search.fits(best):
            raise infeasible(problem, best.decisions)
        return best.decisions

    def first_fitting(self, problem: Problem) -> Decisions | None:
        """The first plan that fits, whatever it costs; None when none is found within the time limit."""
        kinds = find_kinds(problem.view)
        if kinds:
            work = ByRounds(problem, kinds, self.time_limit_s, self.within)
            with contextlib.suppress(BudgetInfeasible):
                work.unfold(self.first_fitting(work.one_of_each.problem) or {})
            return work.best.decisions if work.best else None
        search = Search(problem, now() + self.time_limit_s)
        best = search.judge({})
        if search.fits(best):
            return {}
        if problem.floor_bytes > problem.target_bytes:
            return None
        for plan in self._improving(search, best):
            if search.fits(plan):
                return plan.decisions
        return None

    def _by_rounds(self, problem: Problem, kinds: list[list[Round]]) -> Decisions | None:
        """The plan for one round of each kind, told to all; None where there is none, and the whole is short enough to be searched."""
        work = ByRounds(problem, kinds, self.time_limit_s, self.within)
        work.is_over = lambda: self.interrupted
        try:
            if problem.view.n <= _LARGE:
                problem.least_step_ms = least_step_ms(problem, _SHARE_FOR_BOUND * self.time_limit_s)
            work.plan()
        except KeyboardInterrupt:
            if work.best is None:
                raise
            self.interrupted = True
        except BudgetInfeasible:
            if problem.view.n > _LARGE:
                raise
        if work.best is None:
            if problem.view.n > _LARGE:
                raise infeasible(problem, work.decisions)
            return None
        return work.best.decisions

    def within(self, problem: Problem, seconds: float) -> Decisions:
        """A plan for another problem; Ctrl-C ends both searches."""
        other = Auto(seconds, for_steps=self.for_steps)
        found = other.plan(problem)
        if other.interrupted:
            self.interrupted = True
        return found

    def _going_on(self, search: Search, best: Plan) -> Plan:
        """How near the budget one can come: a search as for a budget of nothing, so that the peak which a refusal names is met when it
        is asked for. What fits after all is then made cheaper while there is time."""
        longer = Search(search.problem, now() + _SHARE_FOR_NOTHING * self.time_limit_s)
        lowest = min((best, *self._first_checkpoints(longer, {})), key=search.excess)
        if not search.fits(lowest):
            for plan in self._improving(longer.aimed_at(0), search.judge({})):
                if plan.peak_bytes < lowest.peak_bytes:
                    lowest = plan
                if search.fits(plan):
                    break
            else:
                lowest = min(lowest, descend(longer, lowest), key=lambda plan: plan.peak_bytes)
        if not search.fits(lowest):
            return lowest
        *_, lighter = lowest, *lightened(longer, lowest)
        pruned = longer.prune(lighter)
        return [pruned, *self._torn(longer, pruned)][-1]

    def _improving(self, search: Search, best: Plan) -> Iterator[Plan]:
        """Better and better plans."""
        if _is_small(search.problem):
            for plan in every_plan(search):
                if search.better(plan, best):
                    best = plan
                    yield best
            return
        for plan in self._from_starts(search):
            if search.better(plan, best):
                best = plan
                yield best
            if _is_optimal(search, best):
                return
        for plan in (best, search.judge({})):
            if not search.fits(best):
                lower = descend(search.until(search.share_left / 2), plan)
                if search.better(lower, best):
                    best = lower
                    yield best
        yield from self._torn(search, best)

    def _torn(self, search: Search, best: Plan) -> Iterator[Plan]:
        """What tearing out parts of a plan and mending it makes of it, until nothing does."""
        stalled = 0
        while stalled < _STALLED and not search.is_over and search.fits(best) and best.decisions:
            plan = search.tear(best)
            stalled += 1
            if search.better(plan, best):
                best, stalled = plan, 0
                yield best
                if _is_optimal(search, best):
                    return
        if best.decisions and not search.is_over:
            plan = search.exchange(best)
            if search.better(plan, best):
                yield plan

    def _from_starts(self, search: Search) -> Iterator[Plan]:
        """The starts as they are; then what mending and pruning make of those that are promising."""
        judged: dict[frozenset[int], Plan] = {}
        problem = search.problem
        few = len(problem.candidates) <= _MANY
        if not few:
            limited = problem.limited(search.moment(_SHARE_FOR_STARTS))
            yield from _judged(search, _in_time(alike_plans(limited)), judged)
        quick = _QUICK if len(problem.candidates) <= _MOST_FOR_SQUARES else _QUICK[1:]
        yield from _judged(search, portfolio(search, quick, until=_SHARE_AFTER_QUICK), judged)
        if not _is_met(search, judged):
            yield from self._nearest_mended(search, judged)
        is_met = _is_met(search, judged)
        if not is_met:
            yield from self._first_checkpoints(search, judged)
            yield from self._nearest_mended(search, judged)
        if problem.fastest_tier:
            priced = link_priced_plans(problem.limited(search.moment(_SHARE_FOR_STARTS)))
            yield from self._mended(search, _in_time(priced), judged, until=_SHARE_FOR_STARTS)
        if not is_met:
            yield from self._better_checkpoints(search, judged)
        if problem.fastest_tier or not _is_met(search, judged):
            yield from self._from_graph(search, judged)
        yield from _judged(search, [problem.free], judged)
        is_met = _is_met(search, judged)
        if search.is_over and not is_met:
            return
        if not (self.for_steps and is_met):  # they take longer than most first searches
            problem.least_step_ms = least_step_ms(problem, _SHARE_FOR_BOUND * self.time_limit_s)
            yield from _judged(search, programs(search), judged)
        if problem.floor_bytes > problem.target_bytes:
            return
        fitting = sorted((p for p in judged.values() if search.fits(p)), key=lambda p: p.cost_ms)
        others = sorted((p for p in judged.values() if not search.fits(p)), key=search.excess, reverse=True)
        cheapest = fitting[0].cost_ms if fitting else math.inf
        for plan in (*fitting[:1], *others, *fitting[1:]):
            if search.share_left < _SHARE_FOR_SEARCH:
                break
            if plan.cost_ms <= search.near_ms(cheapest):
                for polished in polish(search, plan, search.near_ms(cheapest)):
                    yield polished
                    cheapest = min(cheapest, polished.cost_ms) if search.fits(polished) else cheapest
        if few:
            yield from _judged(search, portfolio(search, _THOROUGH, until=_SHARE_AFTER_THOROUGH), judged)

    def _nearest_mended(self, search: Search, judged: dict[frozenset[int], Plan]) -> Iterator[Plan]:
        """Where no quick start fits, or checkpoints alone, which may take many steps' time: those that come nearest, mended, until one does. Of
        thousands of tensors that may take longer than the search has; what is left then takes longer still, for plans whose steps do, too."""
        limited = search.until(search.share_left / 2)
        if search.problem.floor_bytes <= search.problem.target_bytes:
            limited.deadline = max(limited.deadline, now() + _FOR_NEAREST * self.time_limit_s)
        below_ms = min((plan.cost_ms for plan in judged.values() if search.fits(plan)), default=math.inf)
        others = [plan for plan in judged.values() if not search.fits(plan) and plan.cost_ms < below_ms]
        for plan in sorted(others, key=search.excess)[:_NEAREST]:
            mended = limited.mend(plan, below_ms=below_ms)
            judged.setdefault(frozenset(mended.decisions), mended)
            yield mended
            if search.fits(mended) or limited.is_over:
                return

    @staticmethod
    def _first_checkpoints(search: Search, judged: dict[frozenset[int], Plan]) -> Iterator[Plan]:
        """Where no quick start fits: checkpoints that do, at last with nothing held between them."""
        problem = search.problem.limited(search.moment(_SHARE_AFTER_CHECKPOINTS))
        plans = swept(problem, middle_first(plans_of("sublinear", problem)), ends_with_one_that_fits=True)
        yield from _judged(search, best_of(search.problem, plans), judged)
        if not _is_met(search, judged):
            limited = search.problem.limited(search.deadline)
            yield from _judged(search, _in_time(last_resorts(limited, plans)), judged)

    @staticmethod
    def _better_checkpoints(search: Search, judged: dict[frozenset[int], Plan]) -> Iterator[Plan]:
        """The cheapest that fit; then the cheapest plan so far, made cheaper."""
        problem = search.problem.limited(search.moment(_SHARE_AFTER_CHECKPOINTS))
        sweep = itertools.chain(plans_of("rotor", problem), plans_of("sublinear", problem))
        yield from _judged(search, best_of(search.problem, swept(problem, sweep)), judged)
        fitting = min(filter(search.fits, judged.values()), key=lambda plan: plan.cost_ms, default=None)
        if fitting is not None:
            for plan in lightened(search.until(_SHARE_AFTER_LIGHTENED), fitting):
                yield plan
                judged[frozenset(plan.decisions)] = plan

    def _from_graph(self, search: Search, judged: dict[frozenset[int], Plan]) -> Iterator[Plan]:
        """Where no quick start fits, or there are copies to lay out: what the planner of graphs makes of it, and that mended. Elsewhere the
        search makes more of the time."""
        until = min(search.moment(_SHARE_AFTER_GRAPHS), now() + _SHARE_FOR_GRAPHS * search.seconds)
        yield from self._mended(
            search, _in_time(graph_plans(search.problem, until)), judged, until=_SHARE_AFTER_GRAPHS
        )

    @staticmethod
    def _mended(
        search: Search, decided: Iterable[Decisions], judged: dict[frozenset[int], Plan], *, until: float
    ) -> Iterator[Plan]:
        """As `_judged`; and what does not fit, mended for as long as it costs little more than the cheapest that does, and more than the share `until`
        of the time is left."""
        limited = search.until(until)
        cheapest = min((plan.cost_ms for plan in judged.values() if search.fits(plan)), default=math.inf)
        for plan in _judged(search, decided, judged):
            yield plan
            if not search.fits(plan) and plan.cost_ms <= search.near_ms(cheapest):
                plan = limited.mend(plan, below_ms=search.near_ms(cheapest))
                judged.setdefault(frozenset(plan.decisions), plan)
                yield plan
            if search.fits(plan):
                cheapest = min(cheapest, plan.cost_ms)


def _is_met(search: Search, judged: dict[frozenset[int], Plan]) -> bool:
    return any(search.fits(plan) for plan in judged.values())


def _is_optimal(search: Search, plan: Plan) -> bool:
    """Does it fit at the least cost that any plan can have, as far as that is known?"""
    return search.fits(plan) and plan.cost_ms <= (search.problem.least_step_ms or 0.0) * (1 + _MET)


def _judged(
    search: Search, decided: Iterable[Decisions], judged: dict[frozenset[int], Plan]
) -> Iterator[Plan]:
    """Each of the plans as it was decided and with prefetches placed anew; the latter also into `judged`."""
    for decisions in decided:
        plan = search.judge(decisions)
        yield from (search.as_decided(decisions), plan)
        judged.setdefault(frozenset(plan.decisions), plan)


def _is_small(problem: Problem) -> bool:
    return math.prod(len(_fates(c)) for c in problem.candidates.values()) <= _ALL


def _fates(candidate: Candidate) -> tuple[Decision | None, ...]:
    """All that may be decided about a storage; None: keep it."""
    again = [RECOMPUTE_AGAIN] if RECOMPUTE in candidate.options else []
    return (None, *candidate.options, *again)


def every_plan(search: Search) -> Iterator[Plan]:
    """All combinations of options: only for a handful of candidates, where the best of them is the optimum."""
    candidates = list(search.problem.candidates.values())
    for fates in itertools.product(*(_fates(c) for c in candidates)):
        pairs = zip(candidates, fates, strict=True)
        yield search.judge({c.storage: fate for c, fate in pairs if fate is not None})


def plans_of(name: str, problem: Problem) -> Iterable[Decisions]:
    """All that a strategy has to choose from."""
    rule = find_strategy(name).plans
    return rule(problem) if rule else ()


def portfolio(search: Search, names: Iterable[str], *, until: float) -> Iterator[Decisions]:
    """What other strategies plan, or come to, until only the share `until` of the time is left."""
    limited = search.problem.limited(search.moment(until))
    for name in names:
        if search.share_left < until:
            return
        strategy = find_strategy(name)
        if not strategy.allows & search.problem.allow:
            continue
        try:
            yield strategy.plan(limited)
        except BudgetInfeasible as error:
            if isinstance(error.reached, Reached) and error.reached.decisions:
                yield error.reached.decisions
        except (OutOfTime, NotPossibleHere):
            pass


def _in_time(plans: Iterator[Decisions]) -> Iterator[Decisions]:
    """Those that come before the time is up."""
    with contextlib.suppress(OutOfTime):
        yield from plans


def programs(search: Search) -> Iterator[Decisions]:
    """What the integer program of `checkmate` chooses, of all that is neither swapped nor waited for, and of recomputation alone."""
    for kinds in (frozenset({"recompute", "compress", "drop"}), frozenset({"recompute"})):
        limited = search.problem.limited(search.moment(max(0.0, search.share_left - _SHARE_FOR_PROGRAMS)))
        with contextlib.suppress(NotPossibleHere, OutOfTime):
            yield from answers(limited, kinds)


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


def polish(search: Search, plan: Plan, below_ms: float) -> Iterator[Plan]:
    """What mending, as long as it costs less than `below_ms`, and pruning make of a start."""
    if search.fits(plan):
        yield search.prune(plan)
        return
    for power in (2.0, 1.0, 0.5):
        mended = search.mend(plan, power=power, below_ms=below_ms)
        yield mended
        if search.fits(mended):
            yield search.prune(mended)
        if search.is_over:
            return
