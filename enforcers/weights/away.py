"""Weights away from the last op of forward that reads them until backward asks for them, or is over.

The storage is emptied in place, so that the module's parameter, views of it and what autograd holds are what they were. Whoever reads it
finds it whole: autograd's own reads come through the saved-tensor hooks, every other op through the engine's mode, which stays on in
backward while anything is away; a look past the dispatcher (`data_ptr()`, `numpy()`, pickling, copying) through `readers`; a module that
is called again, in whichever thread, through its call. All are back before a thread starts, and when backward has ended, so that a step,
an evaluation or a checkpoint finds no difference. The copy out is made in every iteration: what wrote to a weight in between does not
matter.

What stays: a weight that is shared between processes or lent, or that something beyond its modules, autograd and this op holds; and one
that is trained where no gradients are recorded, since no backward follows. Where several processes train, a region is compiled, or another
thread of the script's runs, all stay.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from memopt.enforcers.tiers.per_device import PerDevice
from memopt.enforcers.tiers.swap import SwapFailed, without_frames
from memopt.enforcers.tiers.swapped import Swapper
from memopt.enforcers.values import Values
from memopt.enforcers.weights.emptied import EmptiedStorage
from memopt.enforcers.weights.readers import ByteReads
from memopt.enforcers.weights.streamed import StreamedWeights
from memopt.instrument.frames import Frames
from memopt.instrument.iterations import Iterations
from memopt.instrument.live_objects import living
from memopt.instrument.memory.frozen_weights import tensors_of
from memopt.instrument.ops import is_lent, is_plain, is_shared, kind_of, tensors_in
from memopt.instrument.saved import Kept
from memopt.instrument.script.other_threads import is_ours, threads_of_the_script
from memopt.instrument.stepping.single_parameter_step import several_processes
from memopt.instrument.torch_internals import DisableTorchDispatch, storage_use_count

_DETACH = torch.ops.aten.detach.default
_STATE_DICT = nn.Module._save_to_state_dict.__code__
_NEAR = 6
"""So many frames above an op that a `state_dict()` computes is that function."""
_MOST_LOOKS = 6
"""How often it is looked for modules anew."""


class WeightsAway:
    """The weights of one run that are away now."""

    def __init__(
        self,
        frames: Frames,
        iterations: Iterations,
        swapper: Swapper | None,
        values: Values,
        sizes: frozenset[int],
    ) -> None:
        """`sizes`: bytes of those that are to leave between forward and backward."""
        self._sizes = sizes
        self._frames, self._iterations, self._swapper, self._values = frames, iterations, swapper, values
        self.streamed: StreamedWeights | None = None
        """Those that are away whenever nothing uses them."""
        self.away: dict[int, EmptiedStorage] = {}
        """By address."""
        self.leaving: list[EmptiedStorage] = []
        """Those of them whose copies out may not be safe yet."""
        self._owned: dict[int, list[ref[Tensor]]] = {}
        """Storage address -> parameters and buffers of modules."""
        self._looks = 0
        self._saved: dict[int, list[ref[Kept]]] = {}
        """What autograd has saved of storages of these sizes, in this iteration, by address."""
        self._filled: set[int] = set()
        """Got new memory in this iteration."""
        self._stopped = ""
        self._lock = threading.RLock()
        self._rewrites: Callable[[Tensor], None] | None = None
        self._reads = ByteReads(self._looked_at, lambda: self.any_away)
        self._start = threading.Thread.start

    def install(self) -> None:
        self._reads.install()
        start = self._start = threading.Thread.start

        @functools.wraps(start)
        def all_back_first(thread: threading.Thread) -> None:
            if not is_ours(thread):
                self.everything_back()
            start(thread)

        threading.Thread.start = all_back_first  # type: ignore[assignment, method-assign]
        self._frames.entered = self._entered
        self._frames.regions.compiles = self._compiles
        self._rewrites, self._frames.regions.will_rewrite = self._frames.regions.will_rewrite, self._launched

    def remove(self) -> None:
        """All are back, and none leaves."""
        self.stop("the run is over")
        self._reads.remove()
        threading.Thread.start = self._start  # type: ignore[method-assign]
        self._frames.entered = self._frames.regions.compiles = None

    def begin(self) -> None:
        """Training begins, or goes on under the plan: what is streamed leaves."""
        if self._frames.regions.has_compiled:
            self._compiles()
        if self.streamed is not None and not self._stopped:
            self.streamed.send_all()

    def _compiles(self) -> None:
        self.stop("torch.compile has compiled a region, which reads weights unseen")

    def _launched(self, tensor: Tensor) -> None:
        """A Triton kernel of the script's is given `tensor`."""
        self._looked_at(tensor)
        if self._rewrites is not None:
            self._rewrites(tensor)

    def stop(self, why: str) -> None:
        with self._lock:
            self._stopped = self._stopped or why
            self.everything_back()
            if self.streamed is not None:
                self.streamed.stop(why)

    # --- away

    def leave(self, action: int, size_bytes: int, arguments: Iterable[object], *, again: bool = False) -> str:
        """An op has run that was the last to read the weight of `size_bytes`: send it away. Why it stays; empty where it leaves.
        `again`: before another backward call than the first, where nothing is prefetched, hence nothing to be started earlier."""
        tensors = tensors_in(arguments)
        guard = DisableTorchDispatch()
        try:
            with self._lock:
                return self._stopped or self._leave(action, size_bytes, tensors, again=again)
        finally:
            del guard

    def _leave(self, action: int, size_bytes: int, tensors: list[Tensor], *, again: bool) -> str:
        if several_processes():
            return "processes that train together may exchange weights"
        if threads_of_the_script():
            return "another thread of the script's may read weights unseen"
        if self._frames.regions.has_compiled:
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
        if not torch.is_grad_enabled() and any(each.requires_grad for each in owned):
            return "no gradients are recorded"
        if is_lent(storage) or is_shared(storage):
            return "its bytes are shared, or lent by numpy or a file"
        held = {id(each): each for each in (*owned, *tensors) if each.untyped_storage()._cdata == address}
        held |= {id(each): each for each in self._saved_of(address)}
        if storage_use_count(address) > len(held) + self._values.pins_of(storage) + 1:  # one is who asks
            return "something else holds it"
        swapper = self._swapper
        tier = swapper.tier_of(action) if swapper is not None else None
        if swapper is None or tier is None:
            return swapper.reason if swapper is not None else "there is no place to swap to"
        use = swapper.use_of(action, size_bytes) if not again else None
        try:
            emptied = EmptiedStorage(tier, storage, use, noted=address in self._filled)
        except SwapFailed as error:
            without_frames(error)
            return error.what
        self.away[address] = emptied
        self.leaving.append(emptied)
        swapper.joins(action, emptied)
        return ""

    def _weight_among(self, tensors: list[Tensor], size_bytes: int) -> UntypedStorage | None:
        """The one storage of that size that a module owns."""
        for _ in range(2):
            found = {}
            for each in tensors:
                storage = each.untyped_storage() if is_plain(each) else None
                if storage is not None and storage.nbytes() == size_bytes and self._owners(storage._cdata):
                    found[storage._cdata] = storage
            if found or self._looks >= _MOST_LOOKS:
                return next(iter(found.values())) if len(found) == 1 else None
            self._look()
        return None

    def _owners(self, address: int) -> list[Tensor]:
        """Parameters and buffers that lie there still."""
        known = (each() for each in self._owned.get(address, ()))
        return [each for each in known if each is not None and each.untyped_storage()._cdata == address]

    def _look(self) -> None:
        self._looks += 1
        self._owned.clear()
        seen: set[int] = set()
        for module in living(nn.Module)[0]:
            for each in tensors_of(module):
                if id(each) not in seen and is_plain(each):
                    seen.add(id(each))
                    self._owned.setdefault(each.untyped_storage()._cdata, []).append(ref(each))

    def was_saved(self, handle: Kept) -> None:
        """Autograd holds `handle` for backward."""
        storage = handle.tensor.untyped_storage()
        streamed = self.streamed is not None and storage._cdata in self.streamed.streams
        if streamed or storage.nbytes() in self._sizes:
            self._saved.setdefault(storage._cdata, []).append(ref(handle))

    def _saved_of(self, address: int) -> list[Tensor]:
        return [each.tensor for known in self._saved.get(address, ()) if (each := known()) is not None]

    def stream(self, tier: PerDevice, least_bytes: int, *, ahead: bool) -> None:
        """Have frozen weights of `least_bytes` or more away whenever nothing uses them."""
        self.streamed = StreamedWeights(
            self._frames,
            self._iterations,
            tier,
            least_bytes,
            ahead=ahead,
            pins_of=lambda tensor: self._values.pins_of(tensor.untyped_storage()),
            saved_of=self._saved_of,
        )

    def settle(self) -> None:
        """Let go of what has safely been copied out."""
        with self._lock:
            self.leaving[:] = [each for each in self.leaving if not each.settle()]

    # --- back

    @property
    def any_away(self) -> bool:
        """Has to be seen who reads weights?"""
        return bool(self.away or (self.streamed is not None and self.streamed.streams))

    def before(self, func: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """An op is about to run on these."""
        tensors = [each for each in tensors_in((*args, *kwargs.values())) if is_plain(each)]
        streamed = self.streamed
        if streamed is not None and streamed.streams and not (func is _DETACH and _makes_a_state_dict()):
            addresses = [each.untyped_storage()._cdata for each in tensors]
            streamed.op_begins(addresses)
            if not streamed.streams.keys().isdisjoint(addresses):
                streamed.written(_written(func, args, kwargs))
        if self.away:
            for tensor in tensors:
                self._whole(tensor)

    def asked(self, tensor: Tensor) -> None:
        """Backward asks for what it has saved."""
        if self.streamed is not None and is_plain(tensor):
            self.streamed.asked(tensor)
        self._whole(tensor)

    def replayed(self, tensor: Tensor, reader: object) -> None:
        """An op of forward, `reader`, runs again and reads it."""
        if self.streamed is not None and is_plain(tensor):
            self.streamed.replayed(tensor, reader)
        self._whole(tensor)

    def _looked_at(self, tensor: Tensor) -> None:
        """Somebody reads it as no mode sees, or has it handed out."""
        if self.streamed is not None and is_plain(tensor):
            self.streamed.looked_at(tensor)
        self._whole(tensor)

    def _whole(self, tensor: Tensor) -> None:
        if not self.away or not is_plain(tensor):
            return
        address = tensor.untyped_storage()._cdata
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

    def everything_back(self) -> None:
        """As `all_back`, the streamed ones too, until the next iteration."""
        self.all_back()
        if self.streamed is not None:
            self.streamed.all_back()

    def all_back(self) -> None:
        """Nobody has to ask for those that leave between forward and backward, on whichever stream."""
        if self.streamed is not None:
            self.streamed.all_go()
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
        self.all_back()
        self._filled.clear()
        self._saved.clear()
        if self.streamed is not None and not self._stopped:
            self.streamed.new_iteration()

    def _entered(self, module: nn.Module) -> None:
        """A module is called, in any thread: it may read its weights as no mode sees."""
        if not self._frames.thread.is_here and not self._iterations.in_backward:
            if not self._stopped:
                self.stop("another thread calls modules")
            return
        if self.streamed is not None:
            self.streamed.entered(module)
        if self.away:
            for each in tensors_of(module):
                self._whole(each)


def _makes_a_state_dict() -> bool:
    """It detaches every weight, and reads none: not all of them need come for it."""
    frame = sys._getframe(1)
    for _ in range(_NEAR):
        above = frame.f_back
        if above is None or above.f_code is _STATE_DICT:
            return above is not None
        frame = above
    return False


def _written(func: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[int]:
    """Addresses of the storages that an op writes to."""
    kind = kind_of(func)
    places = zip(kind.writes, kind.write_names, strict=True)
    given = [args[at] if at < len(args) else kwargs.get(name) for at, name in places]
    return [each.untyped_storage()._cdata for each in tensors_in(given) if is_plain(each)]
