"""Which replays a plan makes, and what all of it adds up to: kept up to date from one plan to the next.

A plan is evaluated by going to it from the one before: the decisions that differ, the replays that depend on these (in the order in which
backward asks), and those that depend on what these make, or make no more. All that is added up is exact, so that the
result is the same by whichever plans one comes; from the empty one it is the whole simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Literal

from memopt.device import Device
from memopt.estimators.simulator.chains import Chain
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.ledger import Ledger
from memopt.estimators.simulator.replays import MADE, THERE, Found, Replays
from memopt.estimators.simulator.trace_view import Saved

Outcome = Found | Literal["kept", "asked by nobody", "made before"]
"""Of a storage to be made again: what its own replay does; else why there is none."""


class Evaluation:
    """One plan, `decisions`, and what it does. Starts with the empty one."""

    def __init__(self, replays: Replays, device: Device) -> None:
        self.replays, self.view = replays, replays.view
        self.decisions: dict[int, Decision] = {}
        self.ledger = Ledger(self.view, device)
        self.flags: dict[int, int] = {}
        self.outcome: dict[int, Outcome] = {}
        """By the place at which it is asked for."""
        self.maker: dict[int, int] = {}
        """Storage -> place of the replay that makes it."""
        self._readers: dict[int, set[int]] = defaultdict(set)
        """Storage -> places of the replays that depend on how it stands."""
        self._due: list[int] = []
        self._queued: set[int] = set()

    def go_to(self, decisions: Mapping[int, Decision], still_wanted: Callable[[], None]) -> None:
        """Evaluate `decisions`. `still_wanted` is called before each replay is looked for, and may raise: then this is of no use any more."""
        now = self.decisions
        for storage in now.keys() - decisions.keys():
            self._decide(storage, now.pop(storage), None)
        differ = [storage for storage, decision in decisions.items() if now.get(storage) is not decision]
        for storage in differ:
            before, decision = now.get(storage), decisions[storage]
            if not _is_same(before, decision):
                self._decide(storage, before, decision)
                now[storage] = decision
        while self._due:
            still_wanted()
            self._ask(heappop(self._due))
        self._queued.clear()

    def chains(self) -> dict[int, Chain]:
        """Replays by storage that asks for them first, in order."""
        replays = {
            place: outcome.replay
            for place, outcome in sorted(self.outcome.items())
            if isinstance(outcome, Found)
        }
        asked = self.replays.asked
        found: dict[int, Chain] = {}
        for place, each in replays.items():
            if each is not None:
                storage = asked[place].storage
                found[storage] = each.chain if storage not in found else found[storage].and_also(each.chain)
        return found

    def kept(self) -> list[int]:
        """Storages that cannot be made again and stay, in order."""
        asked = self.replays.asked
        kept = (asked[place].storage for place, outcome in sorted(self.outcome.items()) if _is_kept(outcome))
        return list(dict.fromkeys(kept))

    def _decide(self, storage: int, before: Decision | None, after: Decision | None) -> None:
        saved = self.view.saved[storage]
        if before is not None:
            self.ledger.decide(saved, before, back=True)
        if after is not None:
            self.ledger.decide(saved, after)
        flags = 0 if after is None else self.replays.flags(after)
        places, former = self.replays.places_of(storage, after), self.replays.places_of(storage, before)
        if flags != self.flags.get(storage, 0) or places != former:
            self.flags[storage] = flags
            self._await(self._readers.get(storage, ()), after=-1)
            self._await({*places, *former}, after=-1)

    def _await(self, places: Iterable[int], *, after: int) -> None:
        """Ask again at those of `places` that come later."""
        for place in places:
            if place > after and place not in self._queued:
                self._queued.add(place)
                heappush(self._due, place)

    def _ask(self, place: int) -> None:
        """What happens when the storage at `place` is asked for, all before it being settled."""
        saved = self.replays.asked[place]
        before, now = self.outcome.get(place), self._outcome_of(saved, place)
        if before == now:
            return
        made: dict[int, int] = {}
        if before is not None:
            del self.outcome[place]
            self._undo(saved, place, before, made)
        if now is not None:
            self.outcome[place] = now
            self._do(saved, place, now, made)
        for storage, maker in made.items():
            if maker != self.maker.get(storage, -1):
                self._await(self._readers.get(storage, ()), after=place)
                self._await(self.replays.places_of(storage, self.decisions.get(storage)), after=place)
        if _is_kept(before) != _is_kept(now) or saved.held_until >= 0:
            self._await(self._readers.get(saved.storage, ()), after=place)

    def _outcome_of(self, saved: Saved, place: int) -> Outcome | None:
        decision, use = self.decisions.get(saved.storage), saved.first_use
        if decision is None or decision.kind != "recompute":
            return None
        if place not in self.replays.places_of(saved.storage, decision):
            return None
        if saved.gone_after + 1 >= use:
            return "kept"
        if saved.held_until < 0 and self.maker.get(saved.storage, place) < place:
            return "made before"
        if use >= self.view.n:
            return "asked by nobody"
        return self.replays.replay(saved, _Standing(self, place, use).__getitem__)

    def _do(self, saved: Saved, place: int, outcome: Outcome, made: dict[int, int]) -> None:
        if outcome == "asked by nobody":
            self.ledger.stays_away(saved)
        if not isinstance(outcome, Found):
            return
        for storage in outcome.depends:
            self._readers[storage].add(place)
        if outcome.replay is not None:
            self.ledger.replay(saved, place, outcome.replay)
            for stays in outcome.replay.stays:
                if stays.held_until < 0:
                    made.setdefault(stays.storage, self.maker.get(stays.storage, -1))
                    self.maker[stays.storage] = place

    def _undo(self, saved: Saved, place: int, outcome: Outcome, made: dict[int, int]) -> None:
        if outcome == "asked by nobody":
            self.ledger.stays_away(saved, back=True)
        if not isinstance(outcome, Found):
            return
        for storage in outcome.depends:
            self._readers[storage].discard(place)
        if outcome.replay is not None:
            self.ledger.replay(saved, place, outcome.replay, back=True)
            for stays in outcome.replay.stays:
                if self.maker.get(stays.storage) == place:
                    made[stays.storage] = place
                    del self.maker[stays.storage]


class _Standing(dict[int, int]):
    """How a storage stands when the one at `place` is asked for before the op `use`; 0 where it is on the device."""

    def __init__(self, evaluation: Evaluation, place: int, use: int) -> None:
        self._evaluation, self._at, self._use = evaluation, place, use

    def __missing__(self, storage: int) -> int:
        self[storage] = flags = self._found(storage)
        return flags

    def _found(self, storage: int) -> int:
        plan = self._evaluation
        flags = plan.flags.get(storage, 0)
        if not flags:
            return 0
        places = plan.replays.places_of(storage, plan.decisions.get(storage))
        asked = plan.replays.asked
        if self._use <= asked[places[0]].gone_after:
            return 0
        if asked[places[0]].held_until >= 0:
            last = max((place for place in places if place < self._at), default=-1)
            if last >= 0 and (_is_kept(plan.outcome.get(last)) or asked[last].held_until >= self._use):
                return 0
            return flags
        if places[0] < self._at and _is_kept(plan.outcome.get(places[0])):
            return 0
        if plan.maker.get(storage, self._at) < self._at:
            flags |= MADE | THERE if plan.view.saved[storage].release >= self._use else MADE
        return flags


def _is_same(one: Decision | None, other: Decision) -> bool:
    """Is there no difference but in the copies?"""
    return one is not None and (one.kind == other.kind == "swap" or one == other)


def _is_kept(outcome: Outcome | None) -> bool:
    return outcome == "kept" or (isinstance(outcome, Found) and outcome.replay is None)
