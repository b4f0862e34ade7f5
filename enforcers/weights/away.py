"""Weights away from the last op of forward that reads them until backward asks for them, or is over.

The storage is emptied in place, so that the module's parameter, views of it and what autograd holds are what they were. Whoever reads it
finds it whole (`watched.py`). All are back when backward has ended, so that a step, an evaluation or a checkpoint finds no difference. The
copy out is made in every iteration: what wrote to a weight in between does not matter.

What stays: a weight that is shared between processes or lent, or that something beyond its modules, autograd and this op holds (an op that is
made of others, as `einsum` is, holds it until the last of them has run: it is tried again after those that follow); and one
that is trained where no gradients are recorded, unless the profiled call recorded none either, since no backward follows. Where several processes train, a region is compiled, or another
thread of the script's runs, all stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from memopt.enforcers.tiers.swap import SwapFailed, without_frames
from memopt.enforcers.tiers.swapped import Swapper
from memopt.enforcers.values import Values
from memopt.enforcers.weights.emptied import EmptiedStorage, Room
from memopt.instrument.compiled import CompiledRegions
from memopt.instrument.live_objects import living
from memopt.instrument.memory.frozen_weights import tensors_of
from memopt.instrument.ops import is_lent, is_plain, is_shared, tensors_in
from memopt.instrument.script.other_threads import threads_of_the_script
from memopt.instrument.stepping.single_parameter_step import several_processes
from memopt.instrument.torch_internals import DisableTorchDispatch, storage_of, storage_use_count

_MOST_LOOKS = 6
"""How often it is looked for modules anew."""
_MOST_TRIES = 16
"""Ops after which it is tried again to send away what something else held."""
_HELD = "something else holds it"

Told = Callable[[str], None]
"""Why a weight stays; empty where it leaves."""


@dataclass(slots=True)
class _Waiting:
    """A weight that something else holds, maybe for a few ops."""

    action: int
    size_bytes: int
    owner: ref[Tensor]
    again: bool
    unrecorded: bool
    told: Told
    tries: int = _MOST_TRIES


class WeightsAway:
    """Those of one run that are away now."""

    def __init__(
        self,
        regions: CompiledRegions,
        swapper: Swapper,
        values: Values,
        saved_of: Callable[[int], list[Tensor]],
    ) -> None:
        """`saved_of`: what autograd holds of a storage, by its address."""
        self._regions, self._swapper, self._values, self._saved_of = regions, swapper, values, saved_of
        self.away: dict[int, EmptiedStorage] = {}
        """By address."""
        self.leaving: list[EmptiedStorage] = []
        """Those of them whose copies out may not be safe yet."""
        self.waiting: list[_Waiting] = []
        self._owned: dict[int, list[ref[Tensor]]] = {}
        """Storage address -> parameters and buffers of modules."""
        self._looks = 0
        self.room: Room | None = None
        self._filled: set[int] = set()
        """Got new memory in this iteration."""
        self._last: dict[int, ref[Tensor]] = {}
        """By action: who owned what left."""
        self._lock = threading.RLock()

    def leave(
        self,
        action: int,
        size_bytes: int,
        arguments: Iterable[object],
        *,
        again: bool = False,
        unrecorded: bool = False,
        told: Told,
    ) -> None:
        """An op has run that was the last to read the weight of `size_bytes`: send it away. `told`: of whether it leaves, soon.
        `again`: before another backward call than the first, where nothing is prefetched, hence nothing to be started earlier.
        `unrecorded`: the profiled op recorded no gradients."""
        tensors = tensors_in(arguments)
        guard = DisableTorchDispatch()
        try:
            with self._lock:
                why = self._leave(action, size_bytes, tensors, again=again, unrecorded=unrecorded)
                storage = self._weight_among(tensors, size_bytes) if why == _HELD else None
                if storage is None:
                    told(why)
                else:
                    owner = ref(self._owners(storage._cdata)[0])
                    self.waiting.append(_Waiting(action, size_bytes, owner, again, unrecorded, told))
        finally:
            del guard

    def leave_uncalled(self, action: int, size_bytes: int, told: Told) -> None:
        """The call after which this weight leaves is not made in this iteration: send away what left in others. Another one begins, which
        records gradients."""
        owner = self._last[action]() if action in self._last else None
        if owner is not None:
            self.leave(action, size_bytes, [owner], unrecorded=True, told=told)

    def try_again(self) -> None:
        """Another op has run: what held these may be over."""
        guard = DisableTorchDispatch()
        try:
            with self._lock:
                waiting, self.waiting = self.waiting, []
                self.waiting += [each for each in waiting if self._still_waits(each)]
        finally:
            del guard

    def _still_waits(self, waiting: _Waiting) -> bool:
        owner = waiting.owner()
        why = _HELD
        if owner is not None:
            again, unrecorded = waiting.again, waiting.unrecorded
            why = self._leave(waiting.action, waiting.size_bytes, [owner], again=again, unrecorded=unrecorded)
        waiting.tries -= 1
        waits = why == _HELD and owner is not None and waiting.tries > 0
        if not waits:
            waiting.told(why)
        return waits

    def wait_no_more(self) -> None:
        """Forward is over: what something holds still stays."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each.told(_HELD)

    def _leave(
        self, action: int, size_bytes: int, tensors: list[Tensor], *, again: bool, unrecorded: bool
    ) -> str:
        if several_processes():
            return "processes that train together may exchange weights"
        if threads_of_the_script():
            return "another thread of the script's may read weights unseen"
        if self._regions.has_compiled:
            return "a compiled region reads weights unseen"
        storage = self._weight_among(tensors, size_bytes)
        if storage is None:
            return "the weight was not found again"
        address = storage._cdata
        if address in self.away:
            return ""
        owned = self._owners(address)
        if not all(map(is_plain, owned)):
            return "it is no plain tensor"
        if not (torch.is_grad_enabled() or unrecorded) and any(each.requires_grad for each in owned):
            return "no gradients are recorded"
        if is_lent(storage) or is_shared(storage):
            return "its bytes are shared, or lent by numpy or a file"
        held = {id(each): each for each in (*owned, *tensors) if storage_of(each)._cdata == address}
        held |= {id(each): each for each in self._saved_of(address)}
        if storage_use_count(address) > len(held) + self._values.pins_of(storage) + 1:  # one is who asks
            return _HELD
        use = self._swapper.use_of(action, size_bytes) if not again else None
        tier = self._swapper.tier_of(action)
        if tier is None:
            return self._swapper.reason
        try:
            noted = address in self._filled
            emptied = EmptiedStorage(tier, storage, use, noted=noted, room=self.room)
        except SwapFailed as error:
            without_frames(error)
            return error.what
        self.away[address] = emptied
        self.leaving.append(emptied)
        self._last[action] = ref(owned[0])
        self._swapper.joins(action, emptied)
        return ""

    def _weight_among(self, tensors: list[Tensor], size_bytes: int) -> UntypedStorage | None:
        """The storage of that size that a module owns; of several the first that is not away."""
        for _ in range(2):
            found = {}
            for each in tensors:
                storage = storage_of(each) if is_plain(each) else None
                if storage is not None and storage.nbytes() == size_bytes and self._owners(storage._cdata):
                    found[storage._cdata] = storage
            if found or self._looks >= _MOST_LOOKS:
                here = [each for address, each in found.items() if address not in self.away]
                return next(iter(here or found.values()), None)
            self._look()
        return None

    def _owners(self, address: int) -> list[Tensor]:
        """Parameters and buffers that lie there still."""
        known = (each() for each in self._owned.get(address, ()))
        return [each for each in known if each is not None and storage_of(each)._cdata == address]

    def _look(self) -> None:
        self._looks += 1
        self._owned.clear()
        seen: set[int] = set()
        for module in living(nn.Module)[0]:
            for each in tensors_of(module):
                if id(each) not in seen and is_plain(each):
                    seen.add(id(each))
                    self._owned.setdefault(storage_of(each)._cdata, []).append(ref(each))

    def settle(self) -> None:
        """Let go of what has safely been copied out."""
        with self._lock:
            self.leaving[:] = [each for each in self.leaving if not each.settle()]

    def whole(self, tensor: Tensor) -> None:
        """Somebody is about to read `tensor`, or has it handed out."""
        if not self.away or not is_plain(tensor):
            return
        address = storage_of(tensor)._cdata
        if address in self.away:
            guard = DisableTorchDispatch()
            try:
                with self._lock:
                    self._back(address)
            finally:
                del guard

    def _back(self, address: int) -> None:
        known = self.away.get(address)
        if known is None:
            return
        known.get()
        if known.was_filled:
            self._filled.add(address)
        if (
            not known.was_filled or known.storage.device.type == "cpu"
        ):  # elsewhere each stream has to wait by itself
            del self.away[address]

    def all_back(self) -> None:
        """Nobody has to ask from here on, on whichever stream."""
        if not self.away:
            return
        guard = DisableTorchDispatch()
        try:
            with self._lock:
                for known in self.away.values():
                    known.prefetch()
                for address, known in list(self.away.items()):
                    known.finish()
                    if known.was_filled:
                        self._filled.add(address)
                    del self.away[address]
                self.leaving.clear()
        finally:
            del guard

    def new_iteration(self) -> None:
        """All are back."""
        self._filled.clear()
