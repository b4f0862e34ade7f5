"""Frozen weights streamed: their home is a tier, and each is on the device while something uses it.

A weight comes when the module that owns it is called, when an op reads it, or when backward asks for it; it goes when something else
computes: another module call in forward, another node in backward. The tier's copy stays, so that going again takes no copy, unless
something has written to the weight. With `ahead` the next one, in the order of the iteration before, is on its way meanwhile.

ZeRO-Infinity (Rajbhandari et al., SC 2021, section 5) has the parameters of large models elsewhere so; FlexGen (Sheng et al., ICML 2023)
those of inference. Here that is for weights which nothing trains. Who reads them unforeseen is seen as `away` says, at any time.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from weakref import ref

from torch import Tensor, UntypedStorage, nn

from memopt.enforcers.tiers.per_device import PerDevice
from memopt.enforcers.tiers.swap import SwapFailed, without_frames
from memopt.enforcers.weights.emptied import EmptiedStorage, Room
from memopt.instrument.frames import Frames
from memopt.instrument.iterations import Iterations
from memopt.instrument.live_objects import living
from memopt.instrument.memory.frozen_weights import frozen_weights, owners_of, tensors_of
from memopt.instrument.ops import is_lent, is_shared
from memopt.instrument.script.other_threads import threads_of_the_script
from memopt.instrument.stepping.single_parameter_step import several_processes
from memopt.instrument.torch_internals import (
    DisableTorchDispatch,
    current_node,
    storage_of,
    storage_use_count,
)

Context = tuple[object, ...]
"""What a weight is on the device for: `("call", name)` of a module, `("node", number)` of backward, ..."""
_AHEAD: Context = ("ahead",)
"""It comes before anything has asked for it."""
_HELD: Context = ("held",)
"""Something beside its owners holds it: it stays until the iteration ends, or backward."""
_MOST_ASKED = 1 << 16
"""Of an iteration with a long evaluation in it only the first are known in the next."""
_MOST_LOOKS = 4
"""How often it is looked for new modules: as iterations begin."""


class _Stream:
    """One weight."""

    __slots__ = ("_modules", "content", "context", "is_handed_out", "is_written")

    def __init__(self, modules: list[nn.Module], content: EmptiedStorage) -> None:
        self.content = content
        self._modules = [
            *map(ref, modules)
        ]  # a tensor with a weak reference could not be swapped with another
        self.is_written = False
        """Since the tier got its copy."""
        self.is_handed_out = False
        """Somebody may have its bytes, and not only a tensor, whose reads are seen."""
        self.context = _AHEAD

    def owners(self) -> list[Tensor]:
        """The parameters and buffers that lie in it still."""
        address = self.content.storage._cdata
        found = [
            each
            for known in self._modules
            if (module := known()) is not None
            for each in tensors_of(module)
            if storage_of(each)._cdata == address
        ]
        return [*{id(each): each for each in found}.values()]


class StreamedWeights:
    """Those of one run."""

    def __init__(
        self,
        frames: Frames,
        iterations: Iterations,
        tier: PerDevice,
        least_bytes: int,
        *,
        ahead: bool,
        pins_of: Callable[[Tensor], int],
        saved_of: Callable[[int], list[Tensor]],
    ) -> None:
        """`least_bytes`: smaller ones stay. `pins_of`: how many aliases of a weight records hold; `saved_of`: what autograd holds of a
        storage, by its address."""
        self._frames, self._iterations, self.tier = frames, iterations, tier
        self._least_bytes, self._ahead = least_bytes, ahead
        self._pins_of, self._saved_of = pins_of, saved_of
        self.streams: dict[int, _Stream] = {}
        """By the address of the storage."""
        self.here: dict[int, _Stream] = {}
        """Those of them that have been asked for, or are on their way."""
        self.room: Room | None = None
        self._filled: set[int] = set()
        """Got new memory in this iteration, whose profile sees it end."""
        self._before: list[int] = []
        """In which order they were asked for in the iteration before."""
        self._places: dict[int, list[int]] = {}
        """Where each stands there."""
        self._now: list[int] = []
        self._place = 0
        """In that order."""
        self._next: int | None = None
        self._calls = 0
        """Of modules with such weights in backward, over the run."""
        self._recomputed: Context = ()
        """The last one of these: its node, and its number."""
        self._looks = 0
        self._rests = True
        self._lock = threading.RLock()
        self.most_used = 0
        """Most weights that were streamed at once."""
        self.why_not_all = "not all of them were found"

    # --- leaving

    def send_all(self) -> None:
        """All that may be streamed from here on leave: between iterations, or before training begins."""
        why = _why_not_now()
        if why:
            self.why_not_all = why
            return
        self._rests = False
        self._looks += 1
        guard = DisableTorchDispatch()
        try:
            with self._lock:
                modules = living(nn.Module)[0]
                owners = owners_of(modules)
                for address, tensors in frozen_weights(modules).items():
                    if address not in self.streams and not self._send(address, tensors, owners[address]):
                        break
                self.tier.collect()
        finally:
            del guard
        self.most_used = max(self.most_used, len(self.streams))

    def _send(self, address: int, tensors: list[Tensor], owners: list[nn.Module]) -> bool:
        """A weight's first copy out, or its next one after all were back; False where no other can leave either."""
        storage = storage_of(tensors[0])
        if storage.nbytes() < self._least_bytes:
            return True
        if self._held_by_others(address, tensors):
            self.why_not_all = "something beside its module holds a weight"
            return True
        try:
            noted = address in self._filled
            content = EmptiedStorage(self.tier, storage, None, noted=noted, room=self.room)
            content.wait_until_away()
        except SwapFailed as error:
            without_frames(error)
            self.why_not_all = error.what
            return False
        self.streams[address] = _Stream(owners, content)
        return True

    def _held_by_others(self, address: int, owners: list[Tensor]) -> bool:
        """Beside its owners, autograd, records, and whoever asks."""
        held = {id(each): each for each in (*owners, *self._saved_of(address))}
        return bool(storage_use_count(address) > len(held) + self._pins_of(owners[0]) + 1)

    def _go(self, address: int) -> None:
        """Nothing uses it any more."""
        stream = self.streams[address]
        owners = stream.owners()
        if not owners or any(each.requires_grad for each in owners) or _is_others(stream.content.storage):
            stream.content.finish()
            self._forget(address)
            return
        unseen = stream.is_handed_out or not self._iterations.in_backward  # where recomputations hold tensors
        if stream.content.is_held or (unseen and self._held_by_others(address, owners)):
            stream.context, stream.is_handed_out, stream.is_written = _HELD, True, True
            return
        noted = address in self._filled
        if stream.is_written or not stream.content.leave_again(noted=noted):
            self._copy_again(address, stream, noted=noted)
        if address in self.streams:
            stream.is_written = stream.is_handed_out = False
            self.here.pop(address, None)

    def _copy_again(self, address: int, stream: _Stream, *, noted: bool) -> None:
        stream.content.finish()
        try:
            storage = stream.content.storage
            stream.content = EmptiedStorage(self.tier, storage, None, noted=noted, room=self.room)
            stream.content.wait_until_away()
        except SwapFailed as error:
            without_frames(error)
            self.why_not_all = error.what
            self._forget(address)

    def _forget(self, address: int) -> None:
        del self.streams[address]
        self.here.pop(address, None)

    def others_go(self, context: Context, but: Iterable[int] = ()) -> None:
        """What is here for something else than `context` goes, `but` for some, and for the next one."""
        for address, stream in list(self.here.items()):
            if stream.context in (context, _HELD) or address in but:
                continue
            if not (self._ahead and address == self._next):
                self._go(address)

    def all_go(self) -> None:
        """Nothing computes that could use one."""
        if self.here:
            guard = DisableTorchDispatch()
            try:
                with self._lock:
                    self._next = None
                    for address in list(self.here):
                        self._go(address)
            finally:
                del guard

    # --- coming

    def context(self) -> Context:
        """What computes now."""
        if self._iterations.in_backward:
            node = current_node()
            return ("node", node._sequence_nr() if node is not None else -1)
        return ("call", self._frames.current.key)

    def op_begins(self, addresses: list[int]) -> None:
        """An op is about to run that reads the storages at `addresses`, streamed or not."""
        asked = [each for each in addresses if each in self.streams]
        if not (asked or self.here):
            return
        context = self._in_call(self.context())
        guard = DisableTorchDispatch()
        try:
            with self._lock:
                if not self._frames.paused:
                    self._adopt(context)
                self.others_go(context, but=asked)
                for address in asked:
                    self._ask(address, context)
        finally:
            del guard

    def _adopt(self, context: Context) -> None:
        """What has come for a module call that had not begun is for that."""
        for stream in self.here.values():
            if stream.context[0] == "entered" and stream.context[1:] != context:
                stream.context = context

    def _in_call(self, context: Context) -> Context:
        """In backward no frame tells of the module calls of a recomputation: one lasts until the next begins, or its node has ended."""
        return self._recomputed if self._recomputed[:-1] == context else context

    def asked(self, tensor: Tensor) -> None:
        """Backward asks for what it has saved."""
        address = storage_of(tensor)._cdata
        if address in self.streams:
            self.op_begins([address])

    def entered(self, module: nn.Module) -> None:
        """A module is called: its own weights are there, for kernels that no mode sees."""
        own = [a for each in tensors_of(module) if (a := storage_of(each)._cdata) in self.streams]
        if not own:
            return
        context = self.context()
        if self._iterations.in_backward:
            self._calls += 1
            context = self._recomputed = (*context, self._calls)
        guard = DisableTorchDispatch()
        try:
            with self._lock:
                self.others_go(context, but=own)
                for address in own:
                    self._ask(address, context if self._iterations.in_backward else ("entered", *context))
        finally:
            del guard

    def replayed(self, tensor: Tensor, reader: object) -> None:
        """An op of forward, `reader`, runs again and reads it."""
        self._come(tensor, ("replay", id(reader)))

    def looked_at(self, tensor: Tensor) -> None:
        """Somebody gets hold of its bytes, and may write to them."""
        stream = self._come(tensor, ("look",))
        if stream is not None:
            stream.is_written = stream.is_handed_out = True

    def _come(self, tensor: Tensor, context: Context) -> _Stream | None:
        address = storage_of(tensor)._cdata
        stream = self.streams.get(address)
        if stream is not None:
            guard = DisableTorchDispatch()
            try:
                with self._lock:
                    self.others_go(context, but=(address,))
                    self._ask(address, context)
            finally:
                del guard
        return stream

    def written(self, addresses: Iterable[int]) -> None:
        """An op is about to write to these."""
        for address in addresses:
            stream = self.streams.get(address)
            if stream is not None:
                stream.is_written = True

    def _ask(self, address: int, context: Context) -> None:
        stream = self.streams.get(address)
        if stream is None:
            return
        stream.content.get()
        is_new = address not in self.here or stream.context != context
        if stream.content.was_filled:
            self._filled.add(address)
        stream.context = context
        self.here[address] = stream
        if is_new:
            self._goes_on(address)

    def _goes_on(self, address: int) -> None:
        """It is asked for: what comes next is on its way."""
        if len(self._now) < _MOST_ASKED:
            self._now.append(address)
        order, places = self._before, self._places.get(address)
        if places is None:
            return
        later = bisect_left(places, self._place)
        at = places[later if later < len(places) else 0]
        self._place = at + 1
        self._next = order[at + 1] if at + 1 < len(order) else None
        if self._ahead and self._next is not None and self._next not in self.here:
            self._start(self._next)

    def _start(self, address: int) -> None:
        """It comes ahead of whoever asks."""
        coming = self.streams.get(address)
        if coming is None:
            return
        coming.content.prefetch()
        coming.context = _AHEAD
        self.here[address] = coming
        if coming.content.was_filled:
            self._filled.add(address)

    # --- the run

    def new_iteration(self) -> None:
        """Another begins: the order of this one is known."""
        self.all_go()
        if self._now:
            self._before, self._places = self._now, {}
            for place, address in enumerate(self._now):
                self._places.setdefault(address, []).append(place)
        self._now, self._place, self._next = [], 0, None
        self._filled.clear()
        with self._lock:
            for address in [address for address, stream in self.streams.items() if not stream.owners()]:
                self._forget(address)
        if self._rests or self._looks < _MOST_LOOKS:
            self.send_all()

    def stop(self, why: str) -> None:
        """None leaves any more."""
        self.why_not_all = why

    def all_back(self) -> None:
        """Nobody has to ask from here on; until the next iteration."""
        if not self.streams:
            return
        self._rests = True
        guard = DisableTorchDispatch()
        try:
            with self._lock:
                for stream in self.streams.values():
                    stream.content.finish()
                self._filled.update(self.streams)
                self.streams.clear()
                self.here.clear()
                self._next = None
        finally:
            del guard


def _is_others(storage: UntypedStorage) -> bool:
    """Has it been lent since, or shared with other processes?"""
    return is_lent(storage) or is_shared(storage)


def _why_not_now() -> str:
    if several_processes():
        return "processes that train together may exchange weights"
    if threads_of_the_script():
        return "another thread of the script's may read weights unseen"
    return ""
