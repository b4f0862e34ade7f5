"""The weights of a run that may be away, and whoever reads them: everybody finds them whole.

Autograd's own reads come through the saved-tensor hooks, every other op through the engine's mode, which stays on while anything is away,
or in backward, where only Python code can read, through `python_reads`;
a look past the dispatcher (`data_ptr()`, `numpy()`, pickling, copying) through `readers`; a module that is called, in whichever thread,
through its call. All are back before a thread starts.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from memopt.enforcers.tiers.per_device import PerDevice
from memopt.enforcers.tiers.swapped import Swapper
from memopt.enforcers.values import Values
from memopt.enforcers.weights.away import Told, WeightsAway
from memopt.enforcers.weights.emptied import EmptiedStorage, Room
from memopt.enforcers.weights.python_reads import PythonReads
from memopt.enforcers.weights.readers import ByteReads
from memopt.enforcers.weights.streamed import StreamedWeights
from memopt.enforcers.weights.uncalled import Uncalled
from memopt.instrument.frames import Frames
from memopt.instrument.iterations import Iterations
from memopt.instrument.memory.frozen_weights import tensors_of
from memopt.instrument.nodes import nodes_below, saves_by_hooks_alone
from memopt.instrument.ops import PLAIN_TYPES, is_plain, kind_of, tensors_in
from memopt.instrument.saved import Kept
from memopt.instrument.script.other_threads import is_ours
from memopt.instrument.stepping.single_parameter_step import parameters_of
from memopt.instrument.torch_internals import save_to_state_dict, storage_of

_DETACH = torch.ops.aten.detach.default
_STATE_DICT = getattr(save_to_state_dict, "__code__", None)
_NEAR = 6
"""So many frames above an op that a `state_dict()` computes is that function."""


class WatchedWeights:
    """Of one run: those that leave between forward and backward, and those that are streamed."""

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
        self._frames, self._iterations, self._values = frames, iterations, values
        self._between = WeightsAway(frames.regions, swapper, values, self._saved_of) if swapper else None
        self.uncalled = Uncalled()
        self.streamed: StreamedWeights | None = None
        """Those that are away whenever nothing uses them."""
        self._saved: dict[int, list[ref[Kept]]] = {}
        """What autograd has saved of such storages, in this iteration, by address."""
        self._stopped = ""
        self._lock = threading.RLock()
        self._rewrites: Callable[[Tensor], None] | None = None
        self._reads = ByteReads(self._looked_at, lambda: self.any_away)
        self.python_reads = PythonReads(self.before, lambda: self.any_away)
        """Watches backward, where autograd's own ops need not be seen."""
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

    # --- backward

    def reads_are_pythons(self, roots: Iterable[Tensor]) -> bool:
        """May backward from `roots` be left to `python_reads`? Streamed weights are sent for by the ops that come before them."""
        if self.streamed is not None and self.streamed.streams:
            return False
        return all(map(saves_by_hooks_alone, {type(node) for node in nodes_below(roots)}))

    # --- away

    @property
    def away(self) -> Mapping[int, EmptiedStorage]:
        """Those between forward and backward, by address."""
        return self._between.away if self._between is not None else {}

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
        """As `WeightsAway` has it."""
        if self._stopped or self._between is None:
            told(self._stopped or "there is no place to swap to")
        else:
            self._between.leave(action, size_bytes, arguments, again=again, unrecorded=unrecorded, told=told)

    def leave_uncalled(self, action: int, size_bytes: int, told: Told) -> None:
        """As `WeightsAway` has it."""
        if self._between is not None and not self._stopped:
            self._between.leave_uncalled(action, size_bytes, told)

    def was_saved(self, handle: Kept) -> None:
        """Autograd holds `handle` for backward."""
        if handle.tensor.layout is not torch.strided:
            return
        storage = storage_of(handle.tensor)
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
            pins_of=lambda tensor: self._values.pins_of(storage_of(tensor)),
            saved_of=self._saved_of,
        )

    def come_into(self, room: Room) -> None:
        """What comes back asks `room` for memory from here on."""
        for each in (self._between, self.streamed):
            if each is not None:
                each.room = room

    def settle(self) -> None:
        """Let go of what has safely been copied out, and of what an op held until it was over."""
        between = self._between
        if between is None:
            return
        if between.waiting:
            between.try_again()
        if between.leaving:
            between.settle()

    def forward_ended(self) -> None:
        """What has not left stays, for backward asks for it."""
        if self._between is not None and self._between.waiting:
            self._between.wait_no_more()

    # --- back

    @property
    def any_away(self) -> bool:
        """Has to be seen who reads weights?"""
        return bool(self.away or (self.streamed is not None and self.streamed.streams))

    def before(self, func: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """An op is about to run on these."""
        given = (*args, *kwargs.values()) if kwargs else args
        at = {storage_of(each)._cdata: each for each in tensors_in(given) if _has_storage(each)}
        streamed = self.streamed
        if streamed is not None and streamed.streams and not (func is _DETACH and _makes_a_state_dict()):
            streamed.op_begins(list(at))
            if not streamed.streams.keys().isdisjoint(at):
                streamed.written(_written(func, args, kwargs))
        away = self.away
        if away and not away.keys().isdisjoint(at):
            for each in at.values():
                self._whole(each)

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

    def stepped_inside(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins while backward runs, which has yet to ask for weights of others."""
        for _, each in parameters_of(optimizer):
            self._looked_at(each)

    def _looked_at(self, tensor: Tensor) -> None:
        """Somebody reads it as no mode sees, or has it handed out."""
        if self.streamed is not None and is_plain(tensor):
            self.streamed.looked_at(tensor)
        self._whole(tensor)

    def _whole(self, tensor: Tensor) -> None:
        if self._between is not None:
            self._between.whole(tensor)

    def everything_back(self) -> None:
        """As `all_back`, the streamed ones too, until the next iteration."""
        self.all_back()
        if self.streamed is not None:
            self.streamed.all_back()

    def all_back(self) -> None:
        """Nobody has to ask for those that leave between forward and backward, on whichever stream."""
        if self.streamed is not None:
            self.streamed.all_go()
        if self._between is not None:
            self._between.all_back()

    def new_iteration(self) -> None:
        self.forward_ended()
        self.all_back()
        if self._between is not None:
            self._between.new_iteration()
        self.uncalled.new_iteration()
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


def _has_storage(tensor: Tensor) -> bool:
    """May its storage be asked for? Less than `is_plain` asks of it, for each argument of each op."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided


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
    return [storage_of(each)._cdata for each in tensors_in(given) if is_plain(each)]
