"""Gradients that are in a tier from the moment they are whole until the step uses them, and after it until they are cleared.

ZeRO-Infinity (Rajbhandari et al., SC 2021) streams gradients out during backward, for an engine of its own; here they come back to whoever
asks: every look at `parameter.grad` from Python finds the gradient whole (clipping, a scaler, a logger), and it stays while somebody holds
it: with the next look it leaves again. The step in pieces reads one at a time. What adds up over several backward calls is added as autograd
does, in the same order.
A gradient stays where it is when anybody else holds it, when it is small, or when it does not lie in memory as its parameter does.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.enforcers import capturing
from memopt.enforcers.tiers.swap import SwapFailed, SwapTier, without_frames
from memopt.enforcers.tiers.swap_file import PAGE_BYTES
from memopt.enforcers.weights import python_reads
from memopt.enforcers.weights.emptied import Room
from memopt.estimators.simulator.gradients_away import LEAST_BYTES
from memopt.instrument.live_objects import living, no_collections
from memopt.instrument.ops import PLAIN_TYPES
from memopt.instrument.script.signals import held
from memopt.instrument.stepping.gradient_reads import GradientReads, give_back, gradient_of, let_go
from memopt.instrument.stepping.in_pieces import Segment, is_dense, lies_like
from memopt.instrument.stepping.single_parameter_step import parameters_of, several_processes
from memopt.instrument.torch_internals import DisableTorchDispatch, storage_use_count

_ALONE_STORAGE = 2
"""References to a storage that nobody else holds: the tensor and who asks."""


@dataclass(slots=True, eq=False)
class _Away:
    parameter: weakref.ref[Tensor]
    ticket: Any
    like: Tensor
    """Without bytes: type, shape and strides."""


class GradientsElsewhere:
    """Told of backward calls and steps; between `install` and `remove` it sends gradients away."""

    def __init__(self, tier: SwapTier[Any], *, with_small: bool = False) -> None:
        """`with_small`: small ones leave, too."""
        self._tier, self._pid = tier, os.getpid()
        self._least_bytes = 1 if with_small else LEAST_BYTES
        self._reads = GradientReads(self, everywhere=True)
        self._hooked: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._fresh: deque[weakref.ref[Tensor]] = deque()
        """Whole, but perhaps still held by the engine: sent when the next one is whole, or another node begins."""
        self._last: Any = None
        """The ticket of the one that was sent last; at most one is on its way."""
        self._away: dict[int, _Away] = {}
        self._paused = False
        self._hidden = False
        self.room: Room | None = None
        self._looked_at = False
        """Has any come back, as somebody looked, since the last ones were cleared or stepped with?"""
        self._lock = threading.RLock()
        self.most_away = 0
        """Most gradients that were away at once."""

    def install(self) -> None:
        self._reads.install()

    def remove(self) -> None:
        """Every gradient is where it belongs again; send no more. A forked child has none of its parent's: who looks there for one that
        was away is told so."""
        self._hidden = False
        ours = os.getpid() == self._pid
        for known in list(self._away.values()) if ours else ():
            self._bring(known)
        if ours or not self._away:
            self._reads.remove()
        self._unhook()

    def rest(self) -> None:
        """The script has ended: send no more. Those that are away come back to whoever still looks, and to nobody else: their device may be full."""
        self._hidden, self._paused = False, True
        self._fresh.clear()
        self._unhook()

    def _unhook(self) -> None:
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    # --- the training loop

    def backward_begins(self, *, keep_graph: bool, create_graph: bool) -> None:
        """Gradients with a graph of their own stay, and what they add to comes back. So do those that processes exchange: DDP's reducer
        writes them from C++, after our hooks."""
        self._hidden = False  # a step that raised has no end
        self._tell_of_looks()
        self._paused = keep_graph or create_graph or several_processes() or capturing.on_this_stream()
        if self._paused:
            for known in list(self._away.values()):
                self._bring(known)
        elif not self._hooked:
            self.watch(living(torch.optim.Optimizer)[0])

    def asked_for_saved(self) -> None:
        """Autograd begins another node: what is whole is the engine's no more, and what is on its way is to be gone."""
        if self._paused or not (self._fresh or self._last is not None):
            return
        guard = DisableTorchDispatch()
        try:
            with held(), self._lock, torch.no_grad():
                if not self._fresh:
                    self._wait_for_last()
                while self._fresh:
                    self._send_next()
        finally:
            del guard

    def backward_ended(self) -> None:
        with held():
            self._send_fresh()
            self._tier.collect()
            self._paused = False

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Send gradients of what these train."""
        for optimizer in optimizers:
            for _, each in parameters_of(optimizer):
                known = self._hooked.get(id(each))
                if (known is not None and known[0]() is each) or not self._may_leave(each):
                    continue
                handle = each.register_post_accumulate_grad_hook(self._whole)
                self._hooked[id(each)] = weakref.ref(each), handle

    def step_begins(self) -> None:
        """The step in pieces is done: the script's own must find no gradients."""
        self._tell_of_looks()
        self._hidden = True

    def step_ended(self, optimizer: torch.optim.Optimizer, *, leave: bool) -> None:
        """`leave`: send what came back for the step, as the script clears it late."""
        self._hidden = False
        self.watch([optimizer])
        if leave:
            for _, each in parameters_of(optimizer):
                if id(each) in self._hooked and gradient_of(each) is not None:
                    self._fresh.append(weakref.ref(each))
            self.backward_ended()

    def _may_leave(self, parameter: Tensor) -> bool:
        return (
            type(parameter) in PLAIN_TYPES
            and parameter.is_leaf
            and parameter.requires_grad
            and parameter.layout is torch.strided
            and parameter.is_floating_point()
            and parameter.nbytes >= self._least_bytes
            and is_dense(parameter)
        )

    def _whole(self, parameter: Tensor) -> None:
        """The hook: backward has added to the gradient of `parameter` all that it has for it."""
        rests, guard = python_reads.rest(), DisableTorchDispatch()
        try:
            with held(), self._lock, torch.no_grad():
                known = self._known(parameter)
                if known is not None:
                    self._add_to(known, parameter)
                if not self._paused:
                    self._fresh.append(weakref.ref(parameter))
                while len(self._fresh) > 1:
                    self._send_next()
        finally:
            del guard
            python_reads.go_on(rests)

    def _add_to(self, known: _Away, parameter: Tensor) -> None:
        """As `AccumulateGrad` adds to a gradient that is there."""
        new = gradient_of(parameter)
        self._bring(known)
        old = gradient_of(parameter)
        if new is None or old is None:
            return
        if new.layout is torch.strided:
            old.add_(new)
        else:
            give_back(parameter, new + old)

    # --- to and from the tier

    def _send_fresh(self) -> None:
        """All of them, until they are away."""
        while self._fresh:
            self._send_next()
        self._wait_for_last()

    def _send_next(self) -> None:
        self._wait_for_last()
        parameter = self._fresh.popleft()()
        gradient = gradient_of(parameter) if parameter is not None else None
        if parameter is None or gradient is None or not _may_go(gradient, parameter):
            return
        like = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="meta")
        storage = gradient.untyped_storage()
        del gradient
        if _references(parameter) > _references_alone():
            return
        if storage_use_count(storage._cdata) > _ALONE_STORAGE:
            return
        try:
            ticket = self._tier.write_async(storage)
        except SwapFailed as error:
            without_frames(error)
            return
        let_go(parameter)
        del storage
        self._last = self._away[id(parameter)] = _Away(weakref.ref(parameter), ticket, like)
        self.most_away = max(self.most_away, len(self._away))

    def _wait_for_last(self) -> None:
        """Until the copy is safe; where it cannot be made, the gradient is where it was."""
        known, self._last = self._last, None
        if known is None:
            return
        try:
            self._tier.wait(known.ticket)
        except SwapFailed as error:
            without_frames(error)
            self._bring(known)
        self._tier.collect()

    def holds(self, parameter: Tensor) -> bool:
        """Is its gradient away?"""
        return self._known(parameter) is not None

    def copy_of(self, parameter: Tensor) -> Tensor:
        """The gradient, for whoever only reads it; it stays away."""
        known = self._known(parameter)
        assert known is not None
        storage = UntypedStorage(known.ticket.nbytes, device=known.ticket.device)
        self._tier.read_async(known.ticket, storage).result()
        return _on(storage, known.like)

    def part_of(self, segment: Segment) -> Tensor:
        """The gradient of `segment` as a row (a scalar as it is), for whoever only reads it; it stays away."""
        known = self._known(segment.parameter)
        assert known is not None
        size = known.like.itemsize
        page = segment.start * size // PAGE_BYTES * PAGE_BYTES
        storage = UntypedStorage(segment.stop * size - page, device=known.ticket.device)
        self._tier.read_part(known.ticket, page, storage).result()
        row = torch.empty(0, dtype=known.like.dtype, device=storage.device)
        row.set_(storage, segment.start - page // size, (segment.numel,), (1,))
        return row if known.like.dim() else row[0]

    def _known(self, parameter: Tensor) -> _Away | None:
        known = self._away.get(id(parameter))
        return known if known is not None and known.parameter() is parameter else None

    def _bring(self, known: _Away) -> None:
        parameter = known.parameter()
        if parameter is None:
            return
        if self._away.get(id(parameter)) is known:
            del self._away[id(parameter)]
        storage = self._tier.take_back(known.ticket)
        if storage is None:
            storage = UntypedStorage(known.ticket.nbytes, device=known.ticket.device)
            self._tier.read_async(known.ticket, storage).result()
        give_back(parameter, _on(storage, known.like))

    # --- who looks at gradients (Reader)

    def read(self, tensor: Tensor, where: str) -> None:
        """Whoever looks finds it; the one before, at which nobody looks any more, goes again. Torch's own steps look several times at each."""
        if id(tensor) not in self._away:
            return
        with held(), self._lock, torch.no_grad():
            known = self._known(tensor)
            if known is not None and not self._hidden:
                guard = DisableTorchDispatch()
                try:
                    self._send_fresh()
                    self._bring(known)
                    self._looked_at = True
                    if not self._paused:
                        self._fresh.append(weakref.ref(tensor))
                finally:
                    del guard

    def _tell_of_looks(self) -> None:
        """Nobody holds more of them than now."""
        if self._looked_at and self.room is not None:
            self.room.looked_at(0)
        self._looked_at = False

    def set(self, tensor: Tensor) -> None:
        self._forget(tensor)

    def zeroed(self, tensors: Iterable[Tensor], *, to_none: bool) -> None:
        """What is cleared does not come back for it."""
        self._tell_of_looks()
        for tensor in tensors:
            known = self._forget(tensor)
            if known is not None and not to_none:
                guard = DisableTorchDispatch()
                try:
                    storage = UntypedStorage(known.ticket.nbytes, device=known.ticket.device)
                    give_back(tensor, _on(storage, known.like).zero_())
                finally:
                    del guard

    def _forget(self, tensor: Tensor) -> _Away | None:
        known = self._known(tensor)
        if known is not None:
            del self._away[id(tensor)]
        return known


def _references(parameter: Tensor) -> int:
    """To its gradient, as a Python object."""
    gradient = gradient_of(parameter)
    return sys.getrefcount(gradient)


@functools.cache
def _references_alone() -> int:
    """As many as there are where nobody but the parameter holds it: that differs between versions of torch."""
    with no_collections():  # which have references to all that is young
        parameter = torch.zeros(1, requires_grad=True)
        give_back(parameter, torch.zeros(1))
        return _references(parameter)


def _on(storage: UntypedStorage, like: Tensor) -> Tensor:
    """A tensor over `storage`."""
    tensor = torch.empty(0, dtype=like.dtype, device=storage.device)
    with torch.no_grad():
        return tensor.set_(storage, 0, like.shape, like.stride())


def _may_go(gradient: Tensor, parameter: Tensor) -> bool:
    """Is it dense bytes of its own, without a graph?"""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and not gradient.requires_grad
        and gradient.grad_fn is None
        and gradient.dtype == parameter.dtype
        and lies_like(gradient, parameter)
        and gradient.storage_offset() == 0
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )
