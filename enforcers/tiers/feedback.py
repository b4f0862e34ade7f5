"""Feedback at run time: a swap whose copy in came late starts earlier in the next iteration; one that came early, where the peak passed
the budget, starts later (Capuchin, Peng et al., ASPLOS 2020, section 4.5; there by 5 % of the copy at a time, here by what was waited).

The plan stays what it is. What moves is the unpack at which a copy in begins: never to before its copy out is done, and never to where
the bytes would pass the budget, by the plan's own prediction, raised by as much as a measured peak was above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from memopt.enforcers.lookup import AtUse, Tables
from memopt.enforcers.tiers.swap import Pending
from memopt.plan import Plan
from memopt.units import format_ms

LEAST_MS = 0.1
"""A shorter wait is none."""
_SLACK = 1.25
"""A copy is given this much longer than it has taken."""
_MARGIN = 0.005
"""Of the budget: what an earlier start leaves free."""
_ON_DEMAND = -1


HowLong = Callable[[], float | None]
"""Tells how long a stream waited for a copy, in milliseconds; None as long as it has not come so far."""


@runtime_checkable
class OnStream(Protocol):
    """Bytes on their way that a stream waits for, and not the host."""

    is_timed: bool

    def finish(self) -> None:
        """Let the host wait, too."""

    def how_long(self) -> HowLong:
        """What tells it, without holding what has been copied."""


@dataclass(slots=True, eq=False)
class Use:
    """How one swapped storage came back in one iteration; `begun` and `used` are numbers of moments."""

    action: int
    size_bytes: int
    feedback: Feedback
    begun: int | None = None
    used: int | None = None
    waited_ms: float = 0.0
    is_later: bool = False
    """It is asked for after the moment `used` and not at it: a weight, by an op that reads it or when backward is over; what has been asked for
    before."""
    how_long: HowLong | None = None
    """Where the host does not wait itself. It is asked when the iteration is over: the copy's own bytes are long gone by then."""

    def begins(self) -> None:
        """The copy in is started."""
        if self.begun is None:
            self.begun = self.feedback.now

    def wait(self, arrival: Pending) -> None:
        """For the copy, and note how long that took."""
        if isinstance(arrival, OnStream):
            arrival.is_timed = True
        began = time.perf_counter()
        arrival.result()
        if self.used is None:
            self.used = self.feedback.now
            self.how_long = arrival.how_long() if isinstance(arrival, OnStream) else None
            self.waited_ms = 1000 * (time.perf_counter() - began)
            self.feedback.waited_ms += self.waited_ms

    def know(self) -> bool:
        """Is it known how long was waited?"""
        if self.how_long is not None:
            found = self.how_long()
            if found is None:
                return False
            self.waited_ms = found
        self.how_long = None
        return True


@dataclass(slots=True)
class _Round:
    """One iteration: when each moment came, without the waiting; None where it did not."""

    times_ms: list[float | None]
    uses: list[Use] = field(default_factory=list)


class Feedback:
    """The starts of copies in, of one run."""

    def __init__(self, plan: Plan, tables: Tables) -> None:
        """`tables`: those of `plan`, whose `at_use` is what this moves the starts in."""
        self._at: list[AtUse] = []
        for number, moment in enumerate(plan.moments):
            self._at.append(tables.calls[moment.module].moment(moment.ordinal))
            self._at[-1].number = number
        self._rooms = [moment.room_bytes for moment in plan.moments]
        self._planned_ms = None if plan.device.kind == "cpu" else [each.at_ms for each in plan.moments]
        """Of a device that the host runs ahead of: the host's own clock says nothing of when its moments are."""
        self._budget_bytes, self._predicted_bytes = plan.budget_bytes, plan.predicted_peak_bytes
        self._above_bytes = 0
        self._starts: dict[int, int] = {}
        self._not_before: dict[int, int] = {}
        for action, each in enumerate(tables.actions):
            if each.kind == "swap":
                self._starts[action] = next(
                    (at.number for at in self._at if action in at.prefetch), _ON_DEMAND
                )
                self._not_before[action] = next((at.number + 1 for at in self._at if action in at.due), 0)
        self._asked_before = {
            a for a, each in enumerate(tables.actions) if each.leaves_after is not None and each.slots
        }
        """The moments are the first times at which a slot is asked for, and these are asked for again."""
        self._planned = dict(self._starts)
        self._fixed = {a for a, each in enumerate(tables.actions) if each.prefetch is not None and self._starts.get(a) == _ON_DEMAND}  # fmt: skip
        """Their planned start is no moment that is known here."""
        self.now = _ON_DEMAND
        """Number of the last moment that has come."""
        self.waited_ms = 0.0
        self._round = _Round([None] * len(self._at))
        self._open: list[_Round] = []
        self.first_ms: float | None = None
        """What the iteration waited that the first change was made after."""
        self.last_ms = 0.0

    # --- in an iteration

    def reach(self, number: int) -> None:
        """The moment has come."""
        times = self._round.times_ms
        if times[number] is None:
            self.now = number
            times[number] = 1000 * time.perf_counter() - self.waited_ms

    def use_of(self, action: int, size_bytes: int) -> Use:
        """To be told of how a storage that leaves now comes back."""
        use = Use(action, size_bytes, self, is_later=action in self._asked_before)
        self._round.uses.append(use)
        return use

    # --- between iterations

    def iteration_ended(self, peak_bytes: int | None) -> None:
        """Move what came late or too early; `peak_bytes`: of this iteration, if it was measured."""
        ended, self._round = self._round, _Round([None] * len(self._at))
        self.now, self.waited_ms = _ON_DEMAND, 0.0
        self._open.append(ended)
        if peak_bytes is not None:
            self._above_bytes = max(0, peak_bytes - self._predicted_bytes)
        if not all(use.know() for use in self._open[0].uses):
            del self._open[:-1]
            return
        known = self._open.pop(0)
        uses = [use for use in known.uses if use.used is not None]
        times = self._planned_ms or known.times_ms
        seen = [n for n, each in enumerate(known.times_ms) if each is not None]
        at = {n: found for n in seen if (found := times[n]) is not None}
        if sorted(at.values()) != list(at.values()):
            return  # other moments than planned for
        before = dict(self._starts)
        waited = sum(use.waited_ms for use in uses)
        if peak_bytes is not None and peak_bytes > self._budget_bytes:
            self._start_later([use for use in uses if use.waited_ms < LEAST_MS], seen)
        self._start_earlier(uses, at)
        self.last_ms = waited
        if self.first_ms is None and before != self._starts:
            self.first_ms = waited

    def _start_earlier(self, uses: list[Use], at: dict[int, float]) -> None:
        """Backwards from the last use, on one lane, each that was waited for by as much as its copy takes."""
        took = {
            use.action: use.waited_ms + at[use.used] - at.get(use.begun, at[use.used])
            for use in uses
            if use.used in at and use.begun is not None and use.waited_ms >= LEAST_MS
        }
        if not took:
            return
        pace = sum(took.values()) / max(1, sum(use.size_bytes for use in uses if use.action in took))
        lane, moved = float("inf"), False
        for use in sorted(uses, key=lambda each: -(each.used or 0)):
            if use.used not in at or use.action in self._fixed:
                continue
            start = self._starts.get(use.action, _ON_DEMAND)
            until = start if _ON_DEMAND < start < use.used else use.used
            copy_ms = took.get(use.action, pace * use.size_bytes)
            end = min(at[use.used], lane)
            if use.action in took or (moved and at.get(until, end) + copy_ms > lane):
                new = self._fitting(use, end - _SLACK * copy_ms, until, at)
                if new < until:
                    self._move(use, new, until)
                    until, moved = new, True
            lane = min(end - copy_ms, at.get(until, end))

    def _fitting(self, use: Use, wanted_ms: float, until: int, at: dict[int, float]) -> int:
        """The latest moment at or before `wanted_ms` from which the bytes fit until `until`, else the first later one."""
        least = self._not_before.get(use.action, 0)
        usable = [n for n in at if least <= n < until]
        if not usable:
            return until
        early = [n for n in usable if at[n] <= wanted_ms]
        best = early[-1] if early else usable[0]
        needed = use.size_bytes + self._above_bytes + int(_MARGIN * self._budget_bytes)
        full = [n for n in range(best, _end(use, until)) if self._rooms[n] < needed]
        return best if not full else next((n for n in usable if n > full[-1]), until)

    def _start_later(self, early: list[Use], seen: list[int]) -> None:
        """Until the peak is under the budget, the largest first: from the first moment on from which it is."""
        for use in sorted(early, key=lambda each: -each.size_bytes):
            start = self._starts.get(use.action, _ON_DEMAND)
            if use.used is None or not _ON_DEMAND < start < use.used:
                continue
            over = [n for n in range(start, use.used) if self._rooms[n] < self._above_bytes]
            if over:
                new = next((n for n in seen if over[-1] < n < use.used), use.used)
                self._move(use, new, start)

    def _move(self, use: Use, new: int, old: int) -> None:
        """The copy in begins at `new`, no longer at `old`; at its use: on demand."""
        assert use.used is not None
        action, size = use.action, use.size_bytes
        for n in range(min(new, old), _end(use, max(new, old))):
            self._rooms[n] += size if new > old else -size
        for at in self._at:
            if action in at.prefetch:
                at.prefetch.remove(action)
        self._starts[action] = new if new < use.used else _ON_DEMAND
        if new < use.used:
            self._at[new].prefetch.append(action)

    def told(self) -> str:
        """Which copies begin elsewhere now, for the outcome; empty where none do."""
        last = len(self._at)
        shifts = [
            (last if now == _ON_DEMAND else now) - (last if then == _ON_DEMAND else then)
            for now, then in zip(self._starts.values(), self._planned.values(), strict=True)
        ]
        earlier, later = sum(each < 0 for each in shifts), sum(each > 0 for each in shifts)
        if not earlier and not later:
            return ""
        moves = [f"{n} {word} than planned" for n, word in ((earlier, "earlier"), (later, "later")) if n]
        return (
            f"of the copies back of {len(shifts)} swapped tensor{'s' * (len(shifts) > 1)} the run began {' and '.join(moves)}: "
            f"a step waited {format_ms(self.first_ms or 0.0)} for them at first, {format_ms(self.last_ms)} at the end"
        )


def _end(use: Use, until: int) -> int:
    """First moment before which all is as planned again, where a copy in starts earlier than at `until`."""
    return until + 1 if use.is_later and until == use.used else until
