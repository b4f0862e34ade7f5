"""Optimizer state in a tier beside the guard, and beside a plan that does nothing about it: where the first step would have no room for
it, and where nothing else is left to move."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from memopt.instrument.memory.room import free_bytes
from memopt.trace import STATE_BESIDE

if TYPE_CHECKING:
    import torch

    from memopt.cli.run.course import Wishes
    from memopt.enforcers.guarding.guard import Guard
    from memopt.enforcers.optimizer.in_pieces import OptimizerInPieces
    from memopt.instrument.loop import Loop
    from memopt.plan import Plan
    from memopt.trace import Trace

FROM_THE_FIRST = "the optimizer's state had no room in its first step: the optimizer steps piece by piece, and state that has no room is on disk or in the host's memory between steps; the cost is told beside a step that does so, too"
_LEAST_PIECE, _MOST_PIECE, _PIECES = 256 << 10, 32 << 20, 128
"""So much of the parameters steps at once: this part of the budget, between these."""
_WHOLE_FROM_BYTES = 64 << 10
"""Smaller tensors of state stay, where the step is not taken in pieces."""
_AT_ONCE = 9
"""Times a piece of parameters that a step has on the device: three pieces of state of two tensors each, and temporaries."""
_SHARE = 0.99
"""Of the budget that state which stays may fill."""


class _Room:
    """For state that comes back as a whole: that of whoever holds the budget then."""

    def __init__(self, guard: Callable[[], Guard | None]) -> None:
        self.guard = guard

    def has_room(self, size_bytes: int) -> bool:
        guard = self.guard()
        return guard is None or guard.has_room(size_bytes)

    def make_room(self, size_bytes: int) -> None:
        if (guard := self.guard()) is not None:
            guard.make_room(size_bytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        if (guard := self.guard()) is not None:
            guard.resized(storage)

    def looked_at(self, size_bytes: int) -> None:
        if (guard := self.guard()) is not None:
            guard.looked_at(size_bytes)

    def leaves_again(self) -> None:
        if (guard := self.guard()) is not None:
            guard.leaves_again()


class StateBeside:
    """Told of the steps of one run."""

    def __init__(self, wishes: Wishes, guard: Callable[[], Guard | None]) -> None:
        """`guard`: who holds the budget now."""
        self._wishes, self._room = wishes, _Room(guard)
        self._pieces: OptimizerInPieces | None = None
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers whose first step has begun."""
        self._spent_ms = 0.0
        """For steps of this iteration."""
        self._there: int | None = None
        """Bytes on the device when it was looked at since the last backward call began, and what first steps have made since."""
        self._is_planned = False
        """Is the plan that is in force one beside which state is away?"""
        self._keeps_bytes: int | None = None
        """What the plan's budget has room for may stay, once it is known how much the step has room for."""
        self.last_away_bytes = 0
        """What was in the tier after the last step: the script may have looked at it since."""
        self.note = ""
        """For the last words."""

    @property
    def is_away(self) -> bool:
        """Is it in a tier between steps?"""
        return self._pieces is not None

    def leaves(self, loop: Loop, budget_bytes: int) -> None:
        """Nothing else is left to move: if there is any on the device it leaves, as what the steps that follow make."""
        from memopt.enforcers.optimizer.first_step import has_state

        if self._pieces is not None:
            self._pieces.keep_none()
        elif any(map(has_state, loop.iterations.stepped)):
            self._send(loop, budget_bytes)

    def _send(self, loop: Loop, budget_bytes: int) -> None:
        from memopt.advisors.kinds import allowed
        from memopt.enforcers.optimizer.in_pieces import OptimizerInPieces
        from memopt.enforcers.tiers.per_device import offload_tier

        if "optimizer" not in allowed(self._wishes.allow, self._wishes.deny):
            return
        piece_bytes = min(max(_LEAST_PIECE, budget_bytes // _PIECES), _MOST_PIECE)
        tier = offload_tier(self._wishes.swap_dir)
        self._pieces = OptimizerInPieces(loop.iterations, piece_bytes, tier, whole_from=_WHOLE_FROM_BYTES)
        self._pieces.come_into(self._room)
        self._pieces.begin(loop.iterations.stepped)

    def goes_on_with(self, pieces: OptimizerInPieces) -> None:
        """The plan is over that had sent it away: it stays so from here on, beside whatever comes next."""
        self._pieces = pieces
        pieces.come_into(self._room)

    def left_alone(self, wishes: Wishes) -> Wishes:
        """For a plan beside which it is away."""
        return dataclasses.replace(wishes, deny=(*wishes.deny, "optimizer")) if self.is_away else wishes

    def first_step(
        self, optimizer: torch.optim.Optimizer, loop: Loop, guard: Guard, *, foreseen: bool
    ) -> None:
        """A step begins: if it is the first that is seen of the optimizer, and would pass the budget with what it makes, it is taken in pieces.
        `foreseen`: what it finds is what a plan that is in force has found."""
        from memopt.enforcers.optimizer.first_step import has_state, made_by_first_step, temporaries_of

        if self.is_away or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        made = made_by_first_step(optimizer)
        if not (made or (has_state(optimizer) and not foreseen)):
            return
        needed = made + temporaries_of(optimizer)
        if (made and self._is_planned) or not self._has_room(needed, made, guard):
            self._send(loop, guard.budget_bytes)
            self.note = FROM_THE_FIRST

    def _has_room(self, needed: int, made: int, guard: Guard) -> bool:
        """On the device, now. A guard that rests looks at all there is, which takes long: once for the optimizers, one for each parameter, that step
        inside one backward call, which lets go of more than they make, or after it."""
        there = self._there
        if not guard.rests or there is None or there + needed > guard.budget_bytes:
            there = guard.bytes_now()
        self._there = there + made
        return there + needed <= guard.budget_bytes

    def comes_back(self, guard: Guard) -> None:
        """Between iterations: it is on the device from here on, as in the plain run, if there is room for that; else all of it is away."""
        pieces = self._pieces
        if pieces is None:
            return
        if pieces.plain_step_bytes() + guard.bytes_now() <= guard.budget_bytes:
            self.end()
        else:
            pieces.keep_none()

    def comes_back_for_a_better_plan(self, device: str) -> bool:
        """Between iterations: the same where the budget has no room, but the device has. Is it so?"""
        from memopt.enforcers.guarding.live_bytes import Live

        if self._pieces is None:
            return False
        needed = self._pieces.plain_step_bytes() + Live(device).look_around().now()
        if needed > (free_bytes(device) or 0):
            return False
        self.end()
        return True

    def end(self) -> None:
        """All of it is on the device from here on."""
        if self._pieces is not None:
            self._pieces.bring_back()
            self._pieces.remove()
            self._pieces, self.note, self.last_away_bytes = None, "", 0

    @property
    def away_bytes(self) -> int:
        """In the tier now."""
        return self._pieces.away_bytes if self._pieces is not None else 0

    def told_of(self, trace: Trace) -> Trace:
        """With the time that the steps of the recorded iteration have taken, which no op in it shows."""
        if not self._spent_ms or not trace.op_count:
            return trace
        *others, last = trace.ops.time_us
        ops = msgspec.structs.replace(trace.ops, time_us=[*others, last + 1000 * self._spent_ms])
        facts = trace.facts | {STATE_BESIDE: self.away_bytes}
        return msgspec.structs.replace(trace, ops=ops, facts=facts, step_ms=trace.step_ms + self._spent_ms)

    def beside(self, plan: Plan) -> Plan:
        """`plan` takes effect: as it is with so much of the state on the device as its budget has room for."""
        self._is_planned = plan.state_beside_bytes > 0
        room = max(0, int(_SHARE * plan.budget_bytes) - plan.predicted_peak_bytes)
        self._keeps_bytes = keeps = min(plan.state_beside_bytes, room)
        peak, base = plan.predicted_peak_bytes + keeps, plan.base_bytes + keeps
        return msgspec.structs.replace(plan, predicted_peak_bytes=peak, base_bytes=base)

    def _keep(self, pieces: OptimizerInPieces) -> None:
        """At the first step under a plan."""
        if self._keeps_bytes is not None and (guard := self._room.guard()) is not None:
            others = guard.bytes_now() - pieces.kept_bytes + _AT_ONCE * pieces.piece_bytes
            pieces.keeps_bytes = max(0, min(self._keeps_bytes, guard.budget_bytes - others))
            self._keeps_bytes = None

    def goes_on(self) -> None:
        """An iteration has saved its first tensor: what a checkpoint, say, has looked at since the last step leaves again."""
        if self._pieces is not None:
            self._pieces.goes_on()

    def new_iteration(self) -> None:
        self._spent_ms = 0.0

    def backward_begins(self) -> None:
        self._there = None

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._pieces is not None:
            began = time.perf_counter()
            self._keep(self._pieces)
            self._pieces.step_begins(optimizer)
            self._spent_ms += 1000 * (time.perf_counter() - began)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self._pieces is not None:
            self._pieces.step_ended(optimizer)
            self.last_away_bytes = self.away_bytes
