"""The moves of `auto`: add the cheapest relief where it is needed, take away what is not needed, tear out a part and mend it.

Everything is judged by the simulator; estimates only order what is tried first.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memopt.advisors.clock import now
from memopt.advisors.profiles.picking import chain_given
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, Decision
from memopt.timeline import Timeline

_FLOOR_MS = 0.002
"""No action is cheaper than so much of the interpreter's time, so that no gain is divided by 0."""
_NEAR = 2.0
"""An overhead this much larger than the best one may still come down: what does not fit yet waits for its copies."""

_CHANGES, _HELPED = 48, 3
"""Other options that are tried where nothing can be added, and of those that help."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions (prefetches placed) and their judgement."""

    decisions: Decisions
    timeline: Timeline
    cost_ms: float
    """Step time."""

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes


class Search:
    """Moves on plans for one problem until `deadline` (a `clock.now` value)."""

    def __init__(self, problem: Problem, deadline: float, seed: int = 0) -> None:
        self.problem = problem
        self.began, self.deadline = now(), deadline
        self.seconds = max(0.0, deadline - self.began)
        self.random = random.Random(seed)
        self.evaluations = 0
        self.moves = [
            (candidate, option) for candidate in problem.candidates.values() for option in candidate.options
        ]
        self.begin = np.array([c.away_by(o)[0].start for c, o in self.moves], dtype=np.int64)
        self.end = np.array(
            [c.away_by(o)[-1].stop if o.each else c.away.stop for c, o in self.moves], dtype=np.int64
        )
        self.relief = np.array(
            [c.saved.size_bytes - o.encoded_bytes for c, o in self.moves], dtype=np.float64
        )
        self.price = np.array([self._solo_ms(c, o) for c, o in self.moves])
        self.of_storage: dict[int, list[int]] = {}
        for index, (candidate, _) in enumerate(self.moves):
            self.of_storage.setdefault(candidate.storage, []).append(index)

    @property
    def is_over(self) -> bool:
        return now() > self.deadline

    @property
    def share_left(self) -> float:
        """Share of the time limit that is left."""
        return (self.deadline - now()) / self.seconds if self.seconds else 0.0

    def moment(self, share: float) -> float:
        """The moment at which only `share` of the time limit is left."""
        return self.deadline - share * self.seconds

    def aimed_at(self, target_bytes: int) -> Search:
        """The same search with another target."""
        other = copy.copy(self)
        other.problem = self.problem.with_target(target_bytes)
        return other

    def lengthen(self, seconds: float) -> None:
        """Give it so much more time."""
        self.seconds += seconds
        self.deadline += seconds

    def end_within(self, seconds: float) -> None:
        """Have it end so long after it began, if that is sooner."""
        self.deadline = min(self.deadline, self.began + seconds)

    def until(self, share: float) -> Search:
        """The same search, which ends when only `share` of the time is left."""
        other = copy.copy(self)
        other.deadline = self.moment(share)
        return other

    def as_decided(self, decisions: Decisions) -> Plan:
        """The decisions with the prefetches that they have."""
        timeline = self.problem.run(decisions)
        return Plan(decisions, timeline, timeline.step_ms)

    def judge(self, decisions: Decisions) -> Plan:
        placed = place_prefetches(self.problem, decisions)
        timeline = self.problem.run(placed)
        self.evaluations += 1
        return Plan(placed, timeline, timeline.step_ms)

    def fits(self, plan: Plan) -> bool:
        return plan.peak_bytes <= self.problem.target_bytes

    def near_ms(self, cost_ms: float) -> float:
        """A step time that what is yet to be done may still bring down to `cost_ms`."""
        plain_ms = self.problem.view.trace.step_ms
        return plain_ms + _NEAR * max(0.0, cost_ms - plain_ms)

    def better(self, one: Plan, other: Plan) -> bool:
        """Is `one` strictly better: it fits and costs less, or comes nearer to fitting?"""
        if self.fits(one) != self.fits(other):
            return self.fits(one)
        if self.fits(one):
            return one.cost_ms < other.cost_ms - 1e-9
        return self.excess(one) < self.excess(other)

    def excess(self, plan: Plan) -> tuple[int, float]:
        return max(0, plan.peak_bytes - self.problem.target_bytes), self.area(plan)

    def area(self, plan: Plan) -> float:
        """Bytes above the target, summed over the ops."""
        over = plan.timeline.high_bytes - self.problem.target_bytes
        return float(over[over > 0].sum())

    def _solo_ms(self, candidate: Candidate, option: Decision) -> float:
        return self.problem.solo_ms(candidate, option) + _FLOOR_MS

    # --- adding

    def mend(
        self,
        plan: Plan,
        *,
        noise: float = 0.0,
        power: float = 1.0,
        most: int = 10_000,
        below_ms: float = float("inf"),
    ) -> Plan:
        """`plan` with decisions added (and, at a replay's own peak, taken away) until it fits, nothing helps or it costs too much."""
        dead: set[int] = set()
        seen: set[tuple[int, float, float]] = set()
        for _ in range(most):
            state = plan.peak_bytes, self.area(plan), plan.cost_ms
            if self.fits(plan) or self.is_over or plan.cost_ms > below_ms or state in seen:
                return plan  # what lowers the area may raise the peak, and the other way round: in a circle
            seen.add(state)
            step = self._add(plan, dead, noise, power) or self._unblock(plan) or self._change(plan)
            if step is None:
                return plan
            plan = step
        return plan

    def _add(self, plan: Plan, dead: set[int], noise: float, power: float) -> Plan | None:
        """The best of the few most promising additions; several at once while far from the target."""
        ranked = self._ranked(plan, dead, noise, power)
        if not ranked:
            return None
        area = self.area(plan)
        batch = max(1, len(ranked) // 60)
        if batch > 1:
            several = dict(plan.decisions)
            for index in ranked[:batch]:
                candidate, option = self.moves[index]
                several[candidate.storage] = option
            trial = self.judge(several)
            if self.area(trial) < 0.98 * area:
                return trial
        best: Plan | None = None
        best_score = 0.0
        tried = 0
        for index in ranked[:24]:
            if self.is_over:
                break
            candidate, option = self.moves[index]
            trial = self.judge({**plan.decisions, candidate.storage: option})
            gain = area - self.area(trial)
            if self.fits(trial):
                gain = area
            if gain <= 0:
                dead.add(index)
                continue
            tried += 1
            score = gain**power / max(_FLOOR_MS, trial.cost_ms - plan.cost_ms + _FLOOR_MS)
            if score > best_score:
                best, best_score = trial, score
            if tried == 3:
                break
        return best

    def _ranked(self, plan: Plan, dead: set[int], noise: float, power: float) -> list[int]:
        """Moves that relieve some op above the target, the most bytes a millisecond first."""
        over = np.maximum(plan.timeline.high_bytes - self.problem.target_bytes, 0).astype(np.float64)
        count = np.concatenate([[0.0], np.cumsum(over > 0)])
        hits = count[self.end] - count[self.begin]
        gain = hits * np.minimum(self.relief, over.max(initial=0.0))
        for storage in plan.decisions:
            gain[self.of_storage[storage]] = 0.0
        if dead:
            gain[list(dead)] = 0.0
        score = gain**power / self.price
        if noise:
            score *= np.exp(noise * np.array([self.random.gauss(0, 1) for _ in range(len(score))]))
        first = [int(i) for i in np.argsort(-score, kind="stable")[:40] if gain[i] > 0]
        exact = {
            i: self._exact(plan, over, i, power) * score[i] / max(1e-12, gain[i] ** power / self.price[i])
            for i in first
        }
        rest = [int(i) for i in np.argsort(-score, kind="stable")[40:] if gain[i] > 0]
        return sorted(first, key=lambda i: -exact[i]) + rest

    def _exact(self, plan: Plan, over: NDArray[np.float64], index: int, power: float) -> float:
        """Bytes above the target that the move takes away, a millisecond of what it costs beside the plan's decisions."""
        candidate, option = self.moves[index]
        spans = candidate.away_by(option) if option.each or candidate.beyond else [candidate.away]
        gain = sum(float(np.minimum(over[span], self.relief[index]).sum()) for span in spans)
        price = self.price[index]
        if option.kind == "recompute":
            price = self._replay_ms(candidate, option, plan.decisions)
        return float(gain**power / price)

    def _replay_ms(self, candidate: Candidate, option: Decision, decisions: Decisions) -> float:
        chain = chain_given(self.problem, candidate, option, decisions)
        return self.problem.replay_ms(chain) + _FLOOR_MS if chain is not None else 1e9

    def _unblock(self, plan: Plan) -> Plan | None:
        """At a peak that replays make: keep one of the storages made there, or do not hold it then, if that lowers the excess."""
        best: Plan | None = None
        for storage in self._made_at(plan, plan.timeline.peak_op)[:24]:
            for trial in (_without(plan, storage), {**plan.decisions, storage: RECOMPUTE_AGAIN}):
                if self.is_over:
                    break
                judged = self.judge(trial)
                if self.excess(judged) < self.excess(best or plan):
                    best = judged
        return best

    def _change(self, plan: Plan) -> Plan | None:
        """Another option for what is to be away at the peak and takes room there all the same (a copy on its way, an encoded form, what a
        replay makes on its way), if that lowers the excess; of the largest."""
        op, best, helped = plan.timeline.peak_op, None, 0
        candidates = [self.problem.candidates[storage] for storage in plan.decisions]
        there = [each for each in candidates if each.away.start <= op < each.away.stop]
        there.sort(key=lambda each: -each.saved.size_bytes)
        trials = [(c.storage, o) for c in there for o in c.options if o != plan.decisions[c.storage]]
        for storage, option in trials[:_CHANGES]:
            if self.is_over:
                break
            judged = self.judge({**plan.decisions, storage: option})
            helped += self.excess(judged) < self.excess(plan)
            if self.excess(judged) < self.excess(best or plan):
                best = judged
            if helped == _HELPED:
                break
        return best

    def _made_at(self, plan: Plan, op: int) -> list[int]:
        """Recomputed storages that come back at `op`."""
        view = self.problem.view
        chains, _ = self.problem.simulator.chains(plan.decisions)
        found: dict[int, None] = {}
        for target, chain in chains.items():
            if view.asked_as(target, early=plan.decisions[target].early).first_use == op:
                found[target] = None
                for replayed in chain.ops:
                    for value in view.writes[replayed]:
                        if view.value_storage[value] in plan.decisions:
                            found[view.value_storage[value]] = None
        return list(found)

    # --- taking away

    def prune(self, plan: Plan, storages: Iterable[int] | None = None) -> Plan:
        """`plan` without the decisions that it does not need, the dearest first; alternatives where they are cheaper."""
        names = list(storages) if storages is not None else list(plan.decisions)
        names = [s for s in names if s in plan.decisions]
        names.sort(key=lambda s: -self.price_of(s, plan.decisions[s]))
        for storage in names:
            if self.is_over:
                break
            trial = self.judge(_without(plan, storage))
            if self.fits(trial) and trial.cost_ms <= plan.cost_ms:
                plan = trial
            elif self._may_be_held(storage, plan.decisions[storage]):
                trial = self.judge({**plan.decisions, storage: RECOMPUTE})
                if self.fits(trial) and trial.cost_ms <= plan.cost_ms:
                    plan = trial
        return plan

    def _may_be_held(self, storage: int, decision: Decision) -> bool:
        """Is it made again for each, and could it be made once for all?"""
        return decision.again or (decision.each and RECOMPUTE in self.problem.candidates[storage].options)

    def exchange(self, plan: Plan) -> Plan:
        """`plan` with each decision replaced by another option for the same storage where that is cheaper and fits."""
        for storage in list(plan.decisions):
            for index in self.of_storage[storage]:
                if self.is_over:
                    return plan
                option = self.moves[index][1]
                if (
                    option.kind == plan.decisions[storage].kind
                    and option.tier == plan.decisions[storage].tier
                    and option.early == plan.decisions[storage].early
                    and option.each == plan.decisions[storage].each
                ):
                    continue
                trial = self.judge({**plan.decisions, storage: option})
                if self.better(trial, plan):
                    plan = trial
        return plan

    def price_of(self, storage: int, decision: Decision) -> float:
        for index in self.of_storage[storage]:
            if self.moves[index][1].kind == decision.kind:
                return float(self.price[index])
        return 0.0

    # --- tearing out

    def tear(self, plan: Plan, *, prune: bool = True) -> Plan:
        """One large-neighbourhood move: take a part of the decisions away (a stretch of the net, or any), mend, prune."""
        names = sorted(plan.decisions, key=lambda s: self.problem.view.saved[s].packed_op)
        if not names:
            return plan
        count = max(1, min(len(names), round(len(names) * self.random.choice((0.05, 0.1, 0.2, 0.35)))))
        if self.random.random() < 0.6:
            first = self.random.randrange(0, max(1, len(names) - count + 1))
            gone = set(names[first : first + count])
        else:
            gone = set(self.random.sample(names, count))
        rest = {s: d for s, d in plan.decisions.items() if s not in gone}
        trial = self.judge(rest)
        if not self.fits(trial):
            below_ms = self.near_ms(plan.cost_ms) if self.fits(plan) else float("inf")
            noise = self.random.choice((0.1, 0.4, 0.8))
            trial = self.mend(trial, noise=noise, most=4 * count + 8, below_ms=below_ms)
        return self.prune(trial) if prune and self.fits(trial) else trial


def _without(plan: Plan, storage: int) -> Decisions:
    rest = dict(plan.decisions)
    rest.pop(storage, None)
    return rest
