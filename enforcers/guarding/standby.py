"""The guard beside a plan: it rests while iterations are as the profiled one was, and holds the budget in those that are not.

An iteration that saves more than was planned for (a longer text, several batches a step, an evaluation with gradients) is known as soon
as it saves a larger tensor than any was in an iteration that was as planned, as more of what it saves before a backward call stays than was
the most there, or it has saved more in all; one that saves other tensors (of another data type), as soon as what was to leave stays. From
there on the guard counts, and moves away what no action of the plan is for.

It stays awake for the next iterations, the more of them the more in a row have needed it; for a while where it woke too late, or the
script has kept something since, so that the next iteration would pass the budget; and for good where a measured one did without it
(what grew is nothing that is saved). Where that does not do, it holds the iterations that follow without the plan's actions on tensors.
Where there is nothing to move it sleeps (`in_vain`).
"""

from __future__ import annotations

import time
from pathlib import Path

from memopt.enforcers.guarding.guard import Guard
from memopt.enforcers.guarding.in_vain import InVain
from memopt.enforcers.guarding.keeping import Held, Keeping
from memopt.enforcers.guarding.what_is_there import freed_by_collecting
from memopt.enforcers.measurements import LESS, MORE, Peaks
from memopt.enforcers.tiers.per_device import offload_tier
from memopt.enforcers.values import Values
from memopt.instrument.loop import Loop
from memopt.outcome import MOVED_BESIDE
from memopt.plan import Plan
from memopt.words import moved_away

_ELEMENT_BYTES = 4
"""Of most elements, in plans that do not tell."""
_STAYS_AWAKE = 16
"""Iterations, at most, after the last that needed it."""
_ANOTHER_PHASE = 4
"""Iterations that needed it and saved as much as each other are another phase of the training, and no exception, where they are half of those
since the first of them."""
_OF_ALL_SIZES = 16
"""As many in a row that needed it are, where they did not, and as many that saved clearly less than was planned for: their plan costs
more than they need."""
_ALIKE = 1.02
_DOUBTFUL = 0.05
"""Of the budget: what an op that no profile has seen is about to take is not known more closely."""
_PASSED = 1.005
"""Times the budget, or the planned peak where that is above it."""


class Largest:
    """The largest amount of an iteration, beside that of those that were as planned."""

    def __init__(self, most: float = 0.0) -> None:
        """`most`: of one as planned, before there was any; 0: not known. It is of a whole iteration, which may have several backward calls."""
        self.new_iteration()
        self._most = most
        self._is_guessed = True

    def new_iteration(self) -> None:
        self._seen = self.largest = self._gone = 0

    def comes_to(self, amount: int) -> bool:
        """What there was of it in this iteration is `amount` now. Is there more than there was in any that was as planned?"""
        self._seen = amount
        self.largest = max(self.largest, amount - self._gone)
        return 0 < self._most < amount - self._gone

    def begin_anew(self) -> None:
        """From here on count from what there was."""
        self._gone = self._seen

    def was_as_planned(self, more: float) -> None:
        """This iteration; another may come to so many times as much."""
        self._most = more * self.largest if self._is_guessed else max(self._most, more * self.largest)
        self._is_guessed = False


class Standby:
    """Told of what an iteration saves, and of its end."""

    def __init__(self, guard: Guard, plan: Plan) -> None:
        self.guard = guard
        self._more = MORE * plan.grown
        """So many times as much as planned may be saved, or stay."""
        self._most_saved_bytes = int(self._more * (plan.saved_bytes or _ELEMENT_BYTES * plan.saved_elements))
        self._plan, self._as_planned = plan, (plan.saved_tensors, plan.saved_elements)
        self._saves, self._stays = Largest(), Largest(self._more * staying_bytes(plan))
        """Bytes that were saved since the last backward call, and of these what stays."""
        self._saves_one = Largest()
        """Bytes of one tensor that was saved."""
        self._most_bytes = max(guard.budget_bytes, plan.predicted_peak_bytes)
        self._room_bytes = _PASSED * self._most_bytes - plan.predicted_peak_bytes
        self._count_kept_anew()
        self._kept_bytes = 0
        """What the script has kept since, for which the guard stays awake."""
        self._excused_bytes = 0
        """Most that a measured iteration came to beyond the budget."""
        self._begun = 0
        """Iterations, under the plan; the first may have the gradients of a step before it."""
        self._has_saved = False
        self._stays_bytes = 0
        self._awake = 0
        """Iterations for which it stays so, this one included."""
        self._was_awake = False
        """From the beginning of this iteration on."""
        self._woken = -2
        """The last iteration that was not as planned; at first neither this one nor the one before."""
        self._stays_after = 0
        """Iterations for which it stays awake after that one: none, and more where the one before was not, either."""
        self.for_good = False
        """Does it stay awake from here on?"""
        self._is_least = plan.over_bytes > 0
        """No plan that was found comes to less: neither does the guard, which moves what is saved and knows no more of what kernels take."""
        self.alone = False
        """Is the plan to take no action? What it makes again pins what that is made of, which the guard could move."""
        self._passed_by: dict[bool, float] = {}
        """Most bytes to an element saved, of iterations that passed the budget since it woke: alone, and beside the plan; of different sizes, a
        longer one passes it by more."""
        self._saved_elements = 0
        """In the last iteration."""
        self._moved = 0
        """Storages, in the iterations before."""
        self._in_vain = InVain()
        self._saved_bytes = 0
        """In this iteration so far."""
        self.most_bytes = 0
        """Most that was live in iterations that have ended, as far as the guard saw it, or that an op was to come to."""
        self.peaks = Peaks()
        """Of those that passed the budget."""
        self.most_saved_bytes = 0
        """Before one backward call, at most, in iterations that have ended."""
        self.looked_ms = 0.0
        """Spent in this iteration on a look at what the script has kept, which few iterations take."""
        self.was_needed = False
        """In the last iteration."""
        self.is_measured = False
        """This iteration, by a profile of torch's, whose memory is not the script's: what that keeps is looked at in others."""
        self._needed_in: list[tuple[int, tuple[int, int]]] = []
        """Of the last iterations, those that needed it, and how many tensors, and elements, autograd saved in each."""
        self._often_needed = 0
        """Iterations that needed it, since there was none such among the last ones."""
        self._less_in: list[tuple[int, int]] = []
        """How many tensors, and elements, autograd saved in each of the last iterations, as far as they saved clearly less."""
        self._often_less = 0
        """Iterations in a row that did."""

    def saved(self, size_bytes: int, saved_bytes: int, staying_bytes: int) -> None:
        """A tensor of `size_bytes` is being saved; with it so many have been saved in this iteration, and of those before it so many are not to
        leave."""
        if not self._has_saved:
            self._has_saved = True
            self.guard.goes_on()
            self._look_at_what_is_kept()
        self.guard.after_backward = False
        self._saved_bytes = saved_bytes
        more = self._saves_one.comes_to(size_bytes) | self._saves.comes_to(saved_bytes)
        more |= self._stays.comes_to(staying_bytes) and not self.alone
        if more or saved_bytes > self._most_saved_bytes:
            self._wake()

    def without_gradients(self, begins: bool) -> None:
        """The call of a module without gradients begins, or has ended: a teacher's, or, where the profiled iteration has none, an evaluation's."""
        if not self._plan.without_gradients:
            self.guard.without_gradients(begins)

    def evaluation_ended(self) -> None:
        """A module is called to be trained, after calls without gradients, and nothing has been saved in this iteration."""
        if not self._plan.without_gradients:
            self.guard.evaluation_ended()

    @property
    def _passed_by_bytes(self) -> int:
        """By how much this iteration passed the budget with nothing left to move; not in an evaluation, which no other plan would change."""
        passed = self.guard.passed
        return passed.now_bytes if self._plan.without_gradients else passed.now_training_bytes

    def backward_ended(self) -> None:
        """What has been saved is gone."""
        self.guard.after_backward = True
        for each in (self._saves, self._stays):
            each.begin_anew()

    def _look_at_what_is_kept(self) -> None:
        """The script may have made something between iterations (a copy of its model), and keeps it."""
        if self._begun > 1 and self.guard.rests and not self.is_measured:
            began = time.perf_counter()
            if self._keeps_too_much(self._at_first):
                self._wake()
            self.looked_ms = 1000 * (time.perf_counter() - began)

    def _keeps_too_much(self, keeping: Keeping) -> bool:
        more = keeping.more_bytes(self._room_bytes)
        if more > self._room_bytes:
            self._kept_bytes = max(self._kept_bytes, more)
        return more > self._room_bytes

    @property
    def _will_rest(self) -> bool:
        """Will the guard rest in the next iteration, unless something is found? To look takes long: a second where a million objects live."""
        return self._awake <= 1 and not self.for_good

    def _count_kept_anew(self) -> None:
        """Of what the script keeps only what it makes from here on."""
        held = Held(self.guard.device, self.guard.tensor_bytes)
        self._at_end = Keeping(held)
        """At the end of iterations."""
        self._at_first = Keeping(held)
        """At their first saved tensors."""

    def _came_to_more(self, peak_bytes: int, *, in_cycles: bool) -> None:
        """A measured iteration came to more than was planned, in which the guard rested. That may be garbage, which is gone now; else what grew is
        nothing that is saved. `in_cycles`: it was garbage when one first did."""
        over, first = peak_bytes - self._most_bytes, not self._excused_bytes
        was_garbage = (first and in_cycles) or freed_by_collecting(self.guard.device) >= over
        self._excused_bytes = peak_bytes
        self.for_good = not was_garbage
        self._count_kept_anew()

    def stays(self, size_bytes: int) -> None:
        """So much stays in this iteration that was to leave: it is not as planned."""
        self._stays_bytes += size_bytes
        if self._stays_bytes > (_PASSED - 1) * self._most_bytes:
            self._wake()

    def _wake(self) -> None:
        if self._woken != self._begun and not self._in_vain.is_over(self._begun, self._saved_bytes):
            more = 2 * self._stays_after + 1 if self._woken == self._begun - 1 else 0
            self._woken, self._stays_after = self._begun, min(more, _STAYS_AWAKE)
            self._stay_awake(self._stays_after)
            self.guard.wake()

    def _stay_awake(self, iterations: int) -> None:
        """In so many after this one."""
        self._awake = max(self._awake, 1 + iterations)

    def iteration_ended(
        self, saved: tuple[int, int], peak_bytes: int | None, *, in_cycles: bool = False
    ) -> None:
        """`saved`: tensors, and elements; `peak_bytes`: of this iteration, where it was measured; `in_cycles` if garbage made one larger than planned."""
        passed, self._saved_elements = self.guard.passed, saved[1]
        over = self._passed_by_bytes
        woke_late = self.guard.most_bytes > max(self.most_bytes, self.guard.budget_bytes)
        self.most_bytes = max(self.most_bytes, self.guard.most_bytes)
        if passed.now_training_bytes > 0:
            came_to = self.guard.budget_bytes + passed.now_training_bytes
            self.peaks.came_to(came_to, saved[1], self._plan)
            if passed.now_training_bytes > _DOUBTFUL * self.guard.budget_bytes:
                self.most_bytes = max(self.most_bytes, came_to)
        if woke_late and over == passed.now_training_bytes and not passed.first_step_bytes:
            self.peaks.came_to(self.most_bytes, saved[1], self._plan)
        self.most_saved_bytes = max(self.most_saved_bytes, self._saves.largest)
        moved = self.guard.moved > self._moved
        helped = moved or over > 0
        if self._was_awake or self._woken == self._begun:
            self._in_vain.watched(self._begun, self._saved_bytes, moved=moved, passed=over > 0)
        needed = helped and (self._woken == self._begun or self.for_good)
        is_whole = saved[1] >= self._as_planned[1]
        if self._kept_bytes and self._was_awake and is_whole and not helped:  # there is room for that
            self._room_bytes, self._kept_bytes = max(self._room_bytes, self._kept_bytes), 0
            self._awake = min(self._awake, 1)
        self._moved = self.guard.moved
        if saved == self._as_planned:
            for each in (self._saves_one, self._saves, *(() if self.alone else (self._stays,))):
                each.was_as_planned(self._more)
        self.was_needed = needed
        self._needed_in = [each for each in self._needed_in if each[0] > self._begun - _OF_ALL_SIZES]
        self._needed_in += [(self._begun, saved)] if needed else []
        self._often_needed = self._often_needed + needed if self._needed_in else 0
        if saved[1] < LESS * self._as_planned[1] and not needed:
            self._often_less += 1
            self._less_in = [*self._less_in, saved][-_OF_ALL_SIZES:]
        else:
            self._often_less, self._less_in = 0, []
        # the first one begins with what the step before it has left
        peak = peak_bytes if peak_bytes is not None and self.guard.rests and self._begun else 0
        if peak > max(self._excused_bytes, _PASSED * self._most_bytes) and not self.for_good:
            self._came_to_more(peak, in_cycles=in_cycles)
        too_late = over > (_PASSED - 1) * self._most_bytes
        looks = self._begun and self._will_rest and not self.is_measured
        if too_late or (looks and self._keeps_too_much(self._at_end)):
            self._stay_awake(_STAYS_AWAKE)

    def new_iteration(self) -> None:
        self._stays_bytes, self._saved_bytes, self._has_saved, self.looked_ms = 0, 0, False, 0.0
        for each in (self._saves_one, self._saves, self._stays):
            each.new_iteration()
        self._begun += 1
        self._awake = max(0, self._awake - 1)
        self._was_awake = (self._awake > 0 or self.for_good) and not self._in_vain.is_over(self._begun)
        if self._was_awake:
            self._choose()
            self.guard.wake()
        elif not self.guard.rests:
            self.guard.rest()
            self._passed_by.clear()
            self.alone = False
        self.guard.new_iteration()

    def _choose(self) -> None:
        """Alone or beside the plan: the other way is tried once this one has passed the budget, then that which passed it by less."""
        over, passed = self._passed_by_bytes, self._passed_by
        share = (self._most_bytes + over) / max(1, self._saved_elements) if over else 0.0
        passed[self.alone] = max(passed.get(self.alone, 0.0), share)
        if passed[self.alone] > passed.get(not self.alone, 0.0) and not self._is_least:
            self.alone = not self.alone

    @property
    def another_phase(self) -> bool:
        """Does the script go on as the plan does not foresee? Asked when the next iteration has begun."""
        last = self._needed_in[-_ANOTHER_PHASE:]
        elements = [found for _, (_, found) in last]
        if len(last) == _ANOTHER_PHASE and max(elements) <= _ALIKE * min(elements):
            return self._begun - last[0][0] <= 2 * _ANOTHER_PHASE and self._would_gain(last)
        return self.is_less or (len(self._needed_in) == _OF_ALL_SIZES and self._would_gain(self._needed_in))

    def _would_gain(self, needed: list[tuple[int, tuple[int, int]]]) -> bool:
        """Would a plan made for one of these do better for the others? Not where they differ from each other as they differ from the one that
        this plan is for, which is as large (sentences, of which each has its own number of steps); nor where they are as this one is for, and the
        script has kept nothing since."""
        if not self._kept_bytes and all(saved == self._as_planned for _, saved in needed):
            return False
        larger = max(elements for _, (_, elements) in needed) > self._more * self._as_planned[1]
        return larger or len({tensors for _, (tensors, _) in needed}) == 1

    @property
    def is_less(self) -> bool:
        """Does it go on with iterations that save less?"""
        return self._often_less >= _OF_ALL_SIZES

    @property
    def unforeseen(self) -> list[tuple[int, int]]:
        """How many tensors, and elements, autograd saved in each of the last iterations that were not as planned."""
        return self._less_in if self.is_less else [saved for _, saved in self._needed_in]

    @property
    def unforeseen_iterations(self) -> int:
        """How many of them there were of late."""
        return self._often_less if self.is_less else self._often_needed

    @property
    def words(self) -> str:
        """What was done; empty where there was no need."""
        guard = self.guard
        moved = f"{MOVED_BESIDE}, {moved_away(guard.moved, guard.moved_bytes)} beside the plan"
        return "; ".join(filter(None, [moved if guard.moved else "", guard.passed.words]))


def standby_of(plan: Plan, loop: Loop, swap_dir: Path, budget_bytes: int, values: Values) -> Standby | None:
    """A guard that holds `budget_bytes` beside `plan`, whose replays are made of `values`; none where the budget is 0."""
    if not budget_bytes:
        return None
    tier = offload_tier(swap_dir)
    guard = Guard(loop, tier, plan.device.kind, budget_bytes, rests=True)
    values.tier = tier
    guard.movable.values = values
    values.kept = lambda value: guard.held_again(value.cached) if value.cached is not None else None
    guard.workspaces = plan.workspace_calls
    return Standby(guard, plan)


def staying_bytes(plan: Plan) -> int:
    """About what stays of what the profiled iteration saved: a storage may be saved several times, and in part."""
    leaving = sum(each.size_bytes for each in plan.actions if each.slots)
    return max(0, plan.saved_bytes - leaving)
