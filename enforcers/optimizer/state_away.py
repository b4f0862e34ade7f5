"""State in a tier between the steps of optimizers that cannot be stepped in pieces: all of it comes back before the step, whatever that
computes, and leaves when it is over.

Each storage is emptied in place and filled in place, so that tensors and their order in the state are what they were. Only tensors to
which nothing but `optimizer.state` leads leave; whoever looks at that finds it whole, since `StateElsewhere` stands in for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import UntypedStorage

from memopt.enforcers import capturing
from memopt.enforcers.optimizer.state_elsewhere import StateElsewhere, stand_in
from memopt.enforcers.tiers.swap import SwapFailed, SwapTier, without_frames
from memopt.enforcers.weights.emptied import EmptiedStorage, Room
from memopt.instrument.iterations import Iterations
from memopt.instrument.script.signals import held
from memopt.instrument.stepping.state_between_steps import state_tensors, why_state_stays
from memopt.instrument.torch_internals import DisableTorchDispatch


class StateAway:
    """Told of the steps of such optimizers."""

    def __init__(self, iterations: Iterations, tier: SwapTier[Any], least_bytes: int) -> None:
        """`least_bytes`: smaller storages stay."""
        self._iterations, self._tier, self._least_bytes = iterations, tier, least_bytes
        self.room: Room | None = None
        self._of: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Away] = weakref.WeakKeyDictionary()
        self.most_away = 0
        """Most storages that were away at once."""
        self._removed = False

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """All of it is back. What a CUDA graph learns the address of never leaves again."""
        away = self._of.get(optimizer)
        if away is not None:
            away.bring_back()
        if capturing.on_this_stream():
            self._away_of(optimizer).stays = "a CUDA graph was captured with it"

    def step_ended(self, optimizer: torch.optim.Optimizer) -> str:
        """Its state leaves. Why it stays; empty where it leaves."""
        if self._removed:
            return ""
        away = self._away_of(optimizer)
        reason = away.leave(optimizer, self._least_bytes, self.room)
        self.most_away = max(self.most_away, sum(each.count for each in self._of.values()))
        return reason

    def is_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """Has somebody looked at its state since that has left?"""
        return optimizer in self._of and self._of[optimizer].is_back

    @property
    def away_bytes(self) -> int:
        """In the tier now."""
        return sum(each.away_bytes for each in self._of.values())

    def bring_back(self) -> None:
        """All of it, of all optimizers."""
        for away in list(self._of.values()):
            away.bring_back()

    def remove(self) -> None:
        """Nothing leaves any more. What is away comes back when somebody asks for it: the tier stays open until the process ends."""
        self._removed = True

    def _away_of(self, optimizer: torch.optim.Optimizer) -> _Away:
        if optimizer not in self._of:
            self._of[optimizer] = _Away(self._iterations, self._tier)
        return self._of[optimizer]


class _Away:
    """The state of one optimizer."""

    def __init__(self, iterations: Iterations, tier: SwapTier[Any]) -> None:
        self._iterations, self._tier = iterations, tier
        self._lock = threading.RLock()
        self._stand_in: Callable[[], StateElsewhere | None] = lambda: None
        """A weak reference, once there is one: it goes with the optimizer."""
        self._gone: list[EmptiedStorage] = []
        self._filled: tuple[int, set[int]] = -1, set()
        """The iteration in which storages got new memory, and their addresses: a profile of it sees them end."""
        self._room: Room | None = None
        self.stays = ""
        self.is_back = False
        """It has been away, and is whole since."""

    @property
    def count(self) -> int:
        return len(self._gone)

    @property
    def away_bytes(self) -> int:
        return sum(each.size_bytes for each in self._gone)

    def leave(self, optimizer: torch.optim.Optimizer, least_bytes: int, room: Room | None) -> str:
        guard = DisableTorchDispatch()
        self.is_back, self._room = False, room
        try:
            with held(), torch.no_grad(), self._lock:
                if vars(optimizer).get("state") is not self._stand_in():
                    self.bring_back()  # nobody's any more, unless the script kept it
                    reason = self.stays or why_state_stays(optimizer)
                    if reason:
                        return reason
                    self._stand_in = stand_in(optimizer, self.bring_back, self._looked_at)
                reason = self.stays or why_state_stays(optimizer, is_ours=True)
                return reason or self._send(optimizer, least_bytes, room)
        finally:
            del guard

    def _send(self, optimizer: torch.optim.Optimizer, least_bytes: int, room: Room | None) -> str:
        reason = ""
        count, filled = self._filled
        away = {each.storage._cdata for each in self._gone}
        for tensor in state_tensors(optimizer):
            storage = tensor.untyped_storage()
            if storage.nbytes() < least_bytes or storage._cdata in away:
                continue
            noted = count == self._iterations.count and storage._cdata in filled
            try:
                self._gone.append(EmptiedStorage(self._tier, storage, None, noted=noted, room=room))
            except SwapFailed as error:
                without_frames(error)
                reason = error.what
                break
        for each in self._gone:
            try:
                each.wait_until_away()
            except SwapFailed as error:
                without_frames(error)
                reason = error.what
        self._tier.collect()
        return reason

    def _looked_at(self) -> None:
        if self._room is not None and self._gone:
            self._room.looked_at(self.away_bytes)
        self.bring_back()

    def bring_back(self) -> None:
        """All of it is where the optimizer left it; until it is told to `leave`."""
        if not self._gone:
            return
        self.is_back = True
        guard = DisableTorchDispatch()
        try:
            with held(), torch.no_grad(), self._lock:
                gone = self._gone
                for each in gone:
                    each.prefetch()
                for each in gone:
                    each.finish()
                if self._filled[0] != self._iterations.count:
                    self._filled = self._iterations.count, set()
                self._filled[1].update(_address(each.storage) for each in gone if each.was_filled)
                self._gone = []
        finally:
            del guard


def _address(storage: UntypedStorage) -> int:
    return int(storage._cdata)
