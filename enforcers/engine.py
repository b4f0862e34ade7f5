"""Enforces a plan on a running script: a mode that records planned ops in forward, and hooks that replace planned tensors.

What autograd holds instead of a planned tensor is a `Planned` handle. It keeps the tensor until the op that saves it has run
(an input is packed before its op, and some ops still write what they save), then lets go as its action says. Anything that is
not as the plan expects (another op, another shape, a changed version, a codec that declines) keeps the tensor: a plan can lose
savings, it can never change a result.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from memopt.codecs.table import is_of_values
from memopt.enforcers.capturing import Capturing
from memopt.enforcers.codecs.encoded import Encoded, flat_storage
from memopt.enforcers.codecs.premises import Call, describe_call, hold
from memopt.enforcers.codecs.table import bytes_beyond, decode, encode, encode_for
from memopt.enforcers.flat_call import CallForm, flatten_call
from memopt.enforcers.handles import Planned, Trigger
from memopt.enforcers.lookup import AtUse, PlannedSlot, Tables
from memopt.enforcers.records import (
    Record,
    Value,
    make,
    record_op,
)
from memopt.enforcers.tiers.swapped import SwappedStorage, Swapper
from memopt.enforcers.values import Values
from memopt.enforcers.weights.away import WeightsAway
from memopt.estimators.simulator.slot_needs import Need
from memopt.instrument import modes
from memopt.instrument.as_plain import as_plain, run_as_plain
from memopt.instrument.deep_graphs import DEEP, make_room
from memopt.instrument.frames import Frame, Frames
from memopt.instrument.iterations import Iterations
from memopt.instrument.one_stream import OneStream
from memopt.instrument.ops import (
    CLONE,
    PLAIN_TYPES,
    OpKind,
    copies_bytes,
    dtype_name,
    is_lent,
    is_plain,
    just_goes_on,
    kind_of,
    same_bits_again,
    updated_statistics,
)
from memopt.instrument.saved import Kept, check_version, let_go_of_bytes
from memopt.instrument.torch_internals import DisableTorchDispatch, current_mode
from memopt.plan import Action

log = logging.getLogger(__name__)

_PLAIN_TYPES = frozenset(PLAIN_TYPES)
_OWN_NODE = re.compile(r"Backward\d+$")


@cache
def _only_reads(node: str) -> bool:
    """Is it a node of torch's own, whose backward writes over nothing that it has saved? A script's `Function` might."""
    return _OWN_NODE.search(node) is not None


class Engine(modes.Mode):
    """The mode and the hooks of one run."""

    def __init__(
        self, tables: Tables, frames: Frames, iterations: Iterations, swapper: Swapper | None, device: str
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tables = tables
        self._frames = frames
        self._iterations = iterations
        self._swapper = swapper
        self._is_watched: Callable[[Tensor], bool] = attrgetter(f"is_{device}")
        self.capturing = Capturing(device)
        self._streams = OneStream()
        self._thread = frames.thread
        self._regions = frames.regions
        self.values = Values(frames.thread)
        self._regions.will_rewrite = self.values.will_be_rewritten
        self._regions.rewrote = self.values.rewritten_unseen
        frames.resizes.told = self.values.will_be_resized
        sizes = frozenset(each.size_bytes for each in tables.actions if each.leaves_after is not None)
        self.weights = (
            WeightsAway(frames, iterations, swapper, self.values, sizes) if swapper and sizes else None
        )
        """Where the plan has frozen weights leave."""
        self.values.whole_first = self.weights.whole if self.weights is not None else None
        self._unsettled: list[Planned] = []
        self._called: Call | None = None
        """The last call, where its outputs may be compressed."""
        self.active = True
        self.done: Counter[int] = Counter()
        """Action -> slots on which it was taken in this iteration."""
        self.declined: dict[int, str] = {}
        """Action -> why it was not taken, the first reason of the run."""
        self.beyond: Counter[int] = Counter()
        """Action -> most bytes that a codec held above what was planned: the values were others than in the profile."""
        self.other_bits: set[str] = set()
        """Ops that were to be run again, and may give other bits then."""
        self.divergences = 0
        """Module calls, over the run, in which something was not as planned."""
        self.saved_tensors = 0
        self.saved_elements = 0
        """What autograd saved in this iteration, in the plan's own measure."""

    @property
    def actions(self) -> list[Action]:
        """The plan's actions by the numbers that `done` and `declined` use."""
        return self._tables.actions

    # --- the mode

    def enter(self) -> None:
        """Watch ops from here on, if there is anything to watch for and the mode is not on already."""
        if self.active and not self._tables.empty and current_mode() is not self:
            modes.enter(self)

    def leave(self) -> None:
        """Stop watching, unless the script has entered modes of its own since (they stay innermost), or weights are away."""
        if self.weights is not None and self.weights.away:
            return
        if current_mode() is self:
            self.__exit__(None, None, None)

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """Stop watching; where the mode stays on, formulas below `roots` that look for one find none of memopt's."""
        self.leave()
        if modes.is_on(self):
            run_as_plain(roots)

    def stop(self) -> None:
        """Enforce nothing from here on; what has been taken away is still given back when it is asked for."""
        self.active = False
        self._unsettled.clear()
        modes.leave(self)

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = as_plain(func)
        iterations = self._iterations
        if self.weights is not None and self.weights.away:
            self.weights.before((*args, *kwargs.values()))
        if not self.active or iterations.in_backward or (iterations.in_step and not torch.is_grad_enabled()):
            return run(*args, **kwargs)
        if self._regions.compiling or not self._thread.is_here or self.capturing.now():
            return run(*args, **kwargs)
        if not _PLAIN_TYPES.issuperset(types):
            return run(*args, **kwargs) if just_goes_on(types) else NotImplemented
        kind = kind_of(func)
        if kind.is_view:
            return run(*args, **kwargs)
        if self._swapper is not None:
            self._swapper.collect()
        tables, frame = self._tables, self._frames.current
        planned, clones = tables.ops.get(frame.key), tables.clones.get(frame.key)
        readers = tables.readers.get(frame.key)
        op = recorded = None
        if planned is not None or clones is not None or self.weights is not None:
            op = (kind.name, frame.next_op(kind.name))
            recorded = planned is not None and not frame.diverged and op in planned
        self._called = (
            describe_call(kind.name, func, args, kwargs) if readers and kind.name in readers else None
        )
        if recorded or self._unsettled or kind.writes or kind.statistics is not None:
            out = self._watch(func, run, kind, args, kwargs, bool(recorded))
        else:
            out = run(*args, **kwargs)
        if clones is not None and kind.name == CLONE and op in clones:
            self._copied(func, kind, args, kwargs, out)
        if op is not None and self.weights is not None:
            self._let_weights_leave(self.weights, frame, op, (*args, *kwargs.values()))
        return out

    def _let_weights_leave(
        self, weights: WeightsAway, frame: Frame, op: tuple[str, int], arguments: tuple[Any, ...]
    ) -> None:
        if weights.leaving:
            weights.settle()
        leaving = self._tables.leaves.get(frame.key)
        for action in leaving.get(op, ()) if leaving is not None and not frame.diverged else ():
            why = self.capturing.why_keep() or weights.leave(
                action, self.actions[action].size_bytes, arguments
            )
            if why:
                self.declined.setdefault(action, why)
            else:
                self.done[action] += 1

    def _watch(
        self,
        func: Any,
        run: Any,
        kind: OpKind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recorded: bool,
    ) -> Any:
        record = None
        flat: list[Any] = []
        if recorded:
            flat, form = flatten_call(args, kwargs)
            record = self._record(func, kind, flat, form)
        if kind.statistics is not None:
            for statistics in updated_statistics(kind, args):
                self.values.source_changes(statistics.untyped_storage()._cdata, but=record)
        written = self.values.about_to_write(kind, args, kwargs, record) if kind.writes else ()
        out = run(*args, **kwargs)
        self.values.overwritten(written)
        if record is not None:
            self.values.remember(record, flat, out)
        if self._unsettled:
            lossy = any(handle.slot.ref.need != "values" for handle in self._unsettled)
            self._settle(describe_call(kind.name, func, args, kwargs) if lossy else None)
        return out

    # --- records

    def _record(self, func: Any, kind: OpKind, flat: list[Any], form: CallForm) -> Record | None:
        """The call, remembered before it runs; None when it could not be made again."""
        if self._regions.depth or not kind.replayable:
            return None  # what a plan says may have been edited
        if not same_bits_again(func, [a for a in flat if isinstance(a, Tensor)]):
            self.other_bits.add(kind.name)
            return None
        try:
            record = record_op(func, kind, flat, form, self.values.freeze)
        except Exception:
            log.warning("%s could not be recorded, its outputs are kept", kind.name, exc_info=True)
            return None
        return None if record.writes_unrecorded() else record

    def _copied(
        self, func: Any, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """A clone has run from whose result the plan makes again what was cloned."""
        if self._regions.depth or self._frames.current.diverged or not copies_bytes(kind.name, args[0], out):
            return
        if self.values.value_in(args[0], args[0].untyped_storage()) is None:
            flat, form = flatten_call((out, *args[1:]), kwargs)
            self.values.remember_source(record_op(func, kind, flat, form, self.values.freeze), args[0])

    # --- hooks

    def pack(self, tensor: Tensor) -> Kept | Planned:
        """The hook: a handle that keeps `tensor`, or one that will let go of it."""
        handle = self._pack(tensor)
        if self.weights is not None and isinstance(handle, Kept):
            self.weights.was_saved(handle)
        return handle

    def _pack(self, tensor: Tensor) -> Kept | Planned:
        if self._iterations.in_backward or not self._thread.is_here or not self.active:
            return Kept(tensor)
        if not is_plain(tensor) or not self._is_watched(tensor):
            return Kept(tensor)
        self.saved_tensors += 1
        self.saved_elements += tensor.numel()
        frame = self._frames.current
        ordinal = frame.packs
        frame.packs += 1
        keep = self.capturing.why_keep()
        if self._swapper is not None and not keep:
            due = self._tables.due.get(frame.key)
            if due is not None and ordinal in due:
                self._swapper.wait_until_away(due[ordinal])
        slots = self._tables.slots.get(frame.key)
        slot = slots.get(ordinal) if slots is not None else None
        if slot is None or frame.diverged:
            brings = self._tables.at_use.get(frame.key, {}).get(ordinal)
            return Kept(tensor) if brings is None else Trigger(tensor, brings)
        keep = keep or self._streams.why_keep(tensor.device)
        if keep:
            self._decline(slot, keep)
            return Kept(tensor)
        if not self._fits(tensor, slot):
            self._diverged(frame)
            return Kept(tensor)
        if is_lent(tensor.untyped_storage()):
            self._decline(slot, "its bytes are numpy's or a file's, which may change unseen")
            return Kept(tensor)
        handle = Planned(tensor, slot)
        if slot.ref.is_output and slot.ref.node:
            own = tensor.grad_fn is None or tensor.grad_fn.name() == slot.ref.node  # indices have no node
            self._act(handle, self._called if own else None)
        else:
            self._unsettled.append(handle)
        return handle

    @staticmethod
    def _fits(tensor: Tensor, slot: PlannedSlot) -> bool:
        return tensor.dim() == slot.ref.dims and dtype_name(tensor.dtype) == slot.ref.dtype

    def unpack(self, handle: Kept | Planned) -> Tensor:
        """The hook: the tensor, made again, read back or decoded. May be called again (`retain_graph`)."""
        tensor = self._unpack(handle)
        if self.weights is not None:
            self.weights.whole(tensor)
        return tensor

    def _unpack(self, handle: Kept | Planned) -> Tensor:
        if self.capturing.now() and isinstance(handle, Kept):
            return handle.get()
        if self._swapper is not None and self.active:
            self._swapper.collect()
            if self.weights is not None and self.weights.leaving:
                self.weights.settle()
        if isinstance(handle, Kept):
            if isinstance(handle, Trigger):
                self._bring_about(handle.brings)
            return handle.get()
        ref = handle.slot.ref
        self._bring_about(self._tables.at_use.get(ref.module, {}).get(ref.ordinal))
        if handle.witness is not None:
            check_version(handle.witness, handle.version, handle, shape=handle.place.size)
        if handle.tensor is not None:
            check_version(handle.tensor, handle.version, handle)
            return handle.tensor
        return self._restore(handle)

    def _bring_about(self, moment: AtUse | None) -> None:
        """What the plan has happen when a slot is asked for: room is made before it is taken."""
        if moment is not None and self._swapper is not None:
            if moment.number >= 0 and self._swapper.feedback is not None:
                self._swapper.feedback.reach(moment.number)
            if moment.due:
                self._swapper.wait_until_away(moment.due)
            self._swapper.prefetch(moment.prefetch)

    def _restore(self, handle: Planned) -> Tensor:
        guard = (
            DisableTorchDispatch()
        )  # what makes a tensor of the bytes is nothing for a mode that watches backward
        try:
            return self._restored(handle)
        finally:
            del guard

    def _restored(self, handle: Planned) -> Tensor:
        content = handle.content
        if isinstance(content, Value):
            storage = make(content)
            if not handle.served:
                handle.served = True
                content.serve(storage, only_read=_only_reads(handle.slot.ref.node))
            return handle.on(storage)
        if isinstance(content, SwappedStorage):
            tensor = handle.on(content.get())
            if not handle.served:
                handle.served = True
                content.served()
            return tensor
        assert isinstance(content, Encoded)
        whole = decode(content)
        return whole if handle.slot.ref.need != "values" else handle.on(whole.untyped_storage())

    # --- actions

    def _settle(self, call: Call | None) -> None:
        """A call has been made: act on what was packed before it."""
        waiting, self._unsettled = self._unsettled, []
        for handle in waiting:
            self._act(handle, call)

    def settle_all(self) -> None:
        """Forward is over: act on what is left, except where the op had to be seen."""
        if self.saved_tensors > DEEP:
            make_room()  # `pack` has looked at the nodes of outputs
        self._settle(None)

    def _act(self, handle: Planned, reader: Call | None) -> None:
        """Let go of the tensor as planned; `reader` is the call whose node saved it, if it was seen."""
        guard = DisableTorchDispatch()  # or the mode counts a codec's ops among the script's
        try:
            self._let_go(handle, reader)
        finally:
            del guard

    def _let_go(self, handle: Planned, reader: Call | None) -> None:
        slot, tensor = handle.slot, handle.tensor
        assert tensor is not None
        another = self._streams.why_keep(tensor.device)
        if another:
            self._decline(slot, another)
        elif tensor._version != handle.version:
            self._decline(slot, "it was changed in place by the op that saved it")
        elif slot.kind == "recompute":
            self._drop_for_replay(handle, tensor)
        elif slot.kind == "swap":
            self._swap(handle, tensor)
        elif slot.ref.need != "values" and not hold(slot.ref, reader):
            self._decline(slot, f"{slot.ref.consumer or slot.ref.node} was not called as in the profile")
        else:
            self._compress(handle, tensor)

    def _drop_for_replay(self, handle: Planned, tensor: Tensor) -> None:
        value = self.values.value_in(tensor, tensor.untyped_storage())
        if value is None:
            self._decline(handle.slot, "the op that made it was not seen")
            return
        value.waiting += 1
        value.again = self._tables.actions[handle.slot.action].again
        self._take(handle, value)

    def _swap(self, handle: Planned, tensor: Tensor) -> None:
        if self._swapper is None:
            self._decline(handle.slot, "there is no place to swap to")
            return
        content = self._swapper.swap_out(handle.slot.action, tensor.untyped_storage())
        if content is None:
            self._decline(handle.slot, self._swapper.reason)
            return
        self.values.is_swapped(tensor, content)
        self._take(handle, content)

    def _compress(self, handle: Planned, tensor: Tensor) -> None:
        slot = handle.slot
        if slot.ref.need == "values":
            encoded = self._encode_storage(slot, tensor)
        else:
            params = {name: tuple(v) if isinstance(v, list) else v for name, v in slot.ref.params.items()}
            encoded = encode_for(Need(slot.ref.need, tuple(params.items())), tensor)
        if encoded is None:
            self._decline(slot, f"codec {slot.codec} does not apply to these values")
            return
        self._take(handle, encoded)

    def _encode_storage(self, slot: PlannedSlot, tensor: Tensor) -> Encoded | None:
        """One encoded form for all views of a storage, and for the replays that read it."""
        storage = tensor.untyped_storage()
        encoded = self.values.encoded_form(storage, tensor._version)
        if encoded is None and is_of_values(slot.codec):
            row, params = flat_storage(tensor), slot.ref.params
            encoded = encode(slot.codec, row, params)
            beyond = bytes_beyond(slot.codec, row, params, encoded)
            self.beyond[slot.action] = max(self.beyond[slot.action], beyond)
            if encoded is not None:
                self.values.is_encoded(storage, tensor._version, encoded)
        return encoded

    def _take(self, handle: Planned, content: Value | SwappedStorage | Encoded) -> None:
        handle.content = content
        handle.witness, handle.tensor = handle.tensor, None
        assert handle.witness is not None
        let_go_of_bytes(handle.witness)
        self.done[handle.slot.action] += 1

    def _decline(self, slot: PlannedSlot, why: str) -> None:
        self.declined.setdefault(slot.action, why)

    def _diverged(self, frame: Frame) -> None:
        if not frame.diverged:
            frame.diverged = True
            self.divergences += 1

    # --- the loop

    def new_iteration(self) -> None:
        """Forget what ended with the iteration."""
        self.done.clear()
        self._streams.new_iteration()
        self.saved_tensors = self.saved_elements = 0
        self.values.new_iteration()
        if self.weights is not None:
            self.weights.new_iteration()
        if self._swapper is not None:
            self._swapper.new_iteration()
