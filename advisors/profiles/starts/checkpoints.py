"""A first plan under budgets that only recomputation meets, at some hundred judgements; then less and less of it.

It begins with checkpoints as in Chen et al. 2016 (arXiv 1604.06174). Where no number of them fits, weights leave, too; at last what lies between
them is made again for each op that asks, and is held for none. Then most replays could be shared, and much could be kept: that is tried for
all at once, and where it does not fit, for either half by itself, the dearest first (as delta debugging does: Zeller and Hildebrandt 2002).
The simulator judges each plan.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Iterator
from functools import cached_property

from memopt.advisors.clock import OutOfTime
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.profiles.search import Plan, Search
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, Decision
from memopt.timeline import Timeline

_NEAREST = 12
"""Of a sweep, in which weights and the like leave, too."""
_NEARER = 2
"""Steps between those that do not fit and those that do, which are tried: what a plan is made cheaper by afterwards takes less time."""
_ALIKE = 4
"""Storages whose prices have the same logarithm, times this and rounded, cost alike."""
_LEAST_MS = 1e-6
_PASSES = 3
"""Over all that is decided; each ends where the one before gained nothing."""


class Order:
    """The recomputable storages in the order in which they are made."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        able = [c for c in problem.candidates.values() if c.chain is not None]
        able.sort(key=lambda c: (problem.view.value_producer[c.saved.value], c.storage))
        self.storages = [c.storage for c in able]
        self.made = [problem.view.value_producer[c.saved.value] for c in able]
        self.sizes = [c.saved.size_bytes for c in able]

    def every(self, step: int) -> list[int]:
        """Positions at which a segment of `step` storages ends."""
        return list(range(step - 1, len(self.storages), step))

    def crossing(self, cuts: list[int]) -> frozenset[int]:
        """Storages made at or before a cut and read by a forward op after it."""
        ends = [self.made[cut] for cut in cuts]
        kept = set()
        at = 0
        for storage, made in zip(self.storages, self.made, strict=True):
            while at < len(ends) and ends[at] < made:
                at += 1
            if at < len(ends) and self.last_read.get(storage, -1) > ends[at]:
                kept.add(storage)
        return frozenset(kept)

    @cached_property
    def last_read(self) -> dict[int, int]:
        """Storage -> the last forward op that reads it."""
        view = self.problem.view
        return {
            view.value_storage[value]: op
            for op in range(view.n)
            if view.phase[op] == 0
            for value in view.reads[op]
        }


def middle_first(plans: Iterable[Decisions]) -> list[Decisions]:
    """As many checkpoints as the square root of what there is first, where a sweep is likely to be near the lowest peak."""
    every = list(plans)
    most = 1 + max(map(len, every), default=0)
    return sorted(every, key=lambda each: abs(math.log((most - len(each)) / math.sqrt(most))))


def swept(
    problem: Problem, sweep: Iterable[Decisions], *, ends_with_one_that_fits: bool = False
) -> list[Decisions]:
    """Those of `sweep` that there is time to look at, the lowest peak first."""
    plans: list[tuple[Timeline, Decisions]] = []
    with contextlib.suppress(OutOfTime):
        for decisions in sweep:
            plans.append((problem.run(decisions), decisions))
            if ends_with_one_that_fits and problem.fits(plans[-1][0]):
                break
    return [decisions for _, decisions in sorted(plans, key=lambda plan: plan[0].peak_bytes)]


def best_of(problem: Problem, plans: list[Decisions]) -> Iterator[Decisions]:
    """Of `plans`, which have been judged, the cheapest that fit, the lowest, and one between."""
    judged = [(problem.run(decisions), decisions) for decisions in plans]
    fitting = sorted((p for p in judged if problem.fits(p[0])), key=lambda p: p[0].step_ms)
    yield from (decisions for _, decisions in fitting[:2])
    yield from plans[:2]
    judged.sort(key=lambda p: p[0].peak_bytes * p[0].step_ms)
    yield from (decisions | problem.free for _, decisions in judged[:1])


def last_resorts(problem: Problem, plans: list[Decisions]) -> Iterator[Decisions]:
    """Where none of `plans` fits: the lowest of them with all away that cannot be made again; then checkpoints between which nothing is
    held, the most that fit; at last both."""
    order, others = Order(problem), _others(problem)
    for decisions in plans[:_NEAREST] if others else ():
        yield decisions | others
        if problem.fits(problem.run(place_prefetches(problem, decisions | others))):
            return
    if not (yield from _most_that_fit(problem, order, {})) and others:
        yield from _most_that_fit(problem, order, others)


def _most_that_fit(problem: Problem, order: Order, others: Decisions) -> Generator[Decisions, None, bool]:
    """Checkpoints at every second storage, every fourth, until they fit or none is left; then the most that fit. Replays are longer the
    fewer checkpoints there are, and so is judging them."""

    def fits(step: int) -> Generator[Decisions, None, bool]:
        decisions = _between(order, step) | others
        yield decisions
        return problem.fits(problem.run(place_prefetches(problem, decisions)))

    fails, step = 1, 2
    while not (yield from fits(step)):
        if step > len(order.storages):
            return False
        fails, step = step, 2 * step
    for _ in range(_NEARER):
        middle = (fails + step) // 2
        if fails < middle:
            fails, step = (fails, middle) if (yield from fits(middle)) else (middle, step)
    return True


def _between(order: Order, step: int) -> Decisions:
    kept = order.crossing(order.every(step))
    return {storage: RECOMPUTE_AGAIN for storage in order.storages if storage not in kept}


def _others(problem: Problem) -> Decisions:
    """What cannot be made again, away: weights above all."""
    rest = (c for c in problem.candidates.values() if c.chain is None)
    return {
        c.storage: next((o for o in c.options if o.tier == problem.fastest_tier), c.options[0]) for c in rest
    }


def lightened(search: Search, plan: Plan) -> Iterator[Plan]:
    """Cheaper and cheaper plans, from one that fits."""
    for _ in range(_PASSES):
        before_ms = plan.cost_ms
        for ways in ((RECOMPUTE, None), (None,)):
            for lighter in _halved(search, plan, ways):
                plan = lighter
                yield plan
        if plan.cost_ms >= before_ms:
            return


def _halved(search: Search, plan: Plan, ways: tuple[Decision | None, ...]) -> Iterator[Plan]:
    """What is decided is replaced by the first of `ways` with which the plan fits and costs less (None: the storage is kept)."""
    parts = [_dearest_first(search, plan)]
    while parts and not search.is_over:
        part = parts.pop()
        for way in ways:
            trial = search.judge(_replaced(plan.decisions, part, way))
            if search.fits(trial) and trial.cost_ms < plan.cost_ms:
                plan = trial
                yield plan
                break
        else:
            middle = len(part) // 2
            parts += (part[middle:], part[:middle]) if middle else ()


def _dearest_first(search: Search, plan: Plan) -> list[int]:
    """Storages by what they cost, alike ones so that those of any half lie evenly."""

    def key(item: tuple[int, int]) -> tuple[int, str]:
        place, storage = item
        price = search.price_of(storage, plan.decisions[storage])
        return -round(_ALIKE * math.log(max(price, _LEAST_MS))), f"{place:032b}"[::-1]

    return [storage for _, storage in sorted(enumerate(plan.decisions), key=key)]


def _replaced(decisions: Decisions, storages: list[int], way: Decision | None) -> Decisions:
    if way is None:
        gone = set(storages)
        return {storage: decision for storage, decision in decisions.items() if storage not in gone}
    shared = (storage for storage in storages if decisions[storage] == RECOMPUTE_AGAIN)
    return decisions | dict.fromkeys(shared, way)
