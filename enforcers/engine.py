"""Enforces a plan on a running script: a mode that records planned ops in forward, and hooks that replace planned tensors.

What autograd holds instead of a planned tensor is a `Planned` handle. It keeps the tensor until the op that saves it has run
(an input is packed before its op, and some ops still write what they save), then lets go as its action says. Anything that is
not as the plan expects (another op, another shape, a changed version, a codec that declines) keeps the tensor: a plan can lose
savings, it can never change a result.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from memopt.enforcers.capturing import Capturing
from memopt.enforcers.carried_out import Account
from memopt.enforcers.changing_parameters import ChangingParameters
from memopt.enforcers.codecs.premises import Call, describe_call
from memopt.enforcers.flat_call import CallForm, flatten_call
from memopt.enforcers.guarding.makers import Makers
from memopt.enforcers.guarding.standby import Standby
from memopt.enforcers.handles import Planned
from memopt.enforcers.letting_go import LettingGo
from memopt.enforcers.lookup import NOTHING, AtUse, InCall, PlannedSlot, Tables
from memopt.enforcers.records import Record, record_op
from memopt.enforcers.tiers.swapped import Swapper
from memopt.enforcers.values import Values
from memopt.enforcers.weights import python_reads
from memopt.enforcers.weights.watched import WatchedWeights
from memopt.instrument import modes
from memopt.instrument.accumulate import goes_into_first, in_place
from memopt.instrument.as_plain import as_plain, run_as_plain
from memopt.instrument.deep_graphs import DEEP, make_room
from memopt.instrument.frames import Frame, Frames, root_of
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
from memopt.instrument.saved import Kept, check_version
from memopt.instrument.stepping.torchs_step import any_group_is
from memopt.instrument.torch_internals import current_mode, storage_of
from memopt.plan import Action

log = logging.getLogger(__name__)

_PLAIN_TYPES = frozenset(PLAIN_TYPES)


class Engine(modes.Mode):
    """The mode and the hooks of one run."""

    def __init__(
        self,
        tables: Tables,
        frames: Frames,
        iterations: Iterations,
        swapper: Swapper | None,
        device: str,
        *,
        streams: bool = False,
    ) -> None:
        """`streams`: frozen weights are streamed, too."""
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
        self.changing = ChangingParameters(iterations, self.values, lambda: modes.is_on(self))
        self._regions.will_rewrite = self.values.will_be_rewritten
        self._regions.rewrote = self.values.rewritten_unseen
        frames.resizes.told = self.values.will_be_resized
        sizes = frozenset(a.size_bytes for a in tables.actions if a.leaves_after is not None and not a.slots)
        self.weights = (
            WatchedWeights(frames, iterations, swapper, self.values, sizes) if sizes or streams else None
        )
        """Where the plan has weights leave."""
        self._makers = Makers()
        self.watches = not tables.empty or self.weights is not None
        """Is there anything to be done about tensors?"""
        frames.sleepers.append(self)
        self._asleep = False
        self._never_sleeps = "@" in tables.calls
        self.values.whole_first = self.weights.replayed if self.weights is not None else None
        self.account = Account()
        self._letting_go = LettingGo(tables.actions, self.values, swapper, self._streams, self.account)
        self._unsettled: list[Planned] = []
        self._later: dict[int, list[weakref.ref[Planned]]] = {}
        """By action: what leaves after a later op than the one that saves it."""
        self._called: Call | None = None
        """The last call, where its outputs may be compressed."""
        self.active = True
        self.divergences = 0
        """Module calls, over the run, in which something was not as planned."""
        self.saved_tensors = 0
        self.saved_elements = self.saved_bytes = 0
        """What autograd saved in this iteration, in the plan's own measure."""
        self._leaving_bytes = 0
        """Of these, what the plan has an action for."""
        self.standby: Standby | None = None
        """What sees to tensors that no action of the plan is for."""

    @property
    def actions(self) -> list[Action]:
        """The plan's actions by the numbers that the account uses."""
        return self._tables.actions

    # --- the mode

    def enter(self) -> None:
        """Watch ops from here on, if there is anything to watch for and the mode is not on already."""
        self._asleep = False
        if self.active and self.watches and current_mode() is not self:
            modes.enter(self)

    def sleep(self) -> None:
        """An iteration has ended: watch ops again from the first call of a module on that the plan names, or the first saved tensor. What comes
        before (a batch is made of hundreds of images) is nothing to it, unless a graph lives on."""
        if self._never_sleeps or self._weights_are_away or self.values.any_live:
            self.enter()
        elif not self._asleep:
            self._asleep = True
            modes.leave(self)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """There is nothing to be done about its many small ops, unless it will call backward, or its closure, or has a graph of its own."""
        self.changing.step_begins(optimizer)
        iterations = self._iterations
        trains = iterations.step_has_closure or iterations.in_backward or self.changing.sees_writes
        if not (trains or any_group_is(optimizer, "differentiable") or self._weights_are_away):
            self._asleep = True
            self._leave()

    def step_ended(self) -> None:
        """Watch ops again; as the iteration ends, no more."""
        if self._asleep:
            self.enter()

    def call_begins(self, module: nn.Module, name: str, args: object) -> None:
        """`Frames` tells of it."""
        if self._asleep and root_of(name) in self._tables.roots:
            self.enter()

    def evaluated(self) -> None:
        """`Frames` tells of it: before the training goes on a batch may be made."""
        if not self.saved_tensors and self.active and not self._iterations.in_backward:
            self.sleep()

    def leave(self) -> None:
        """Stop watching, unless the script has entered modes of its own since (they stay innermost), or weights are away."""
        if not self._weights_are_away:
            self._leave()

    @property
    def _weights_are_away(self) -> bool:
        return self.weights is not None and self.weights.any_away

    def _leave(self) -> None:
        modes.leave_if_innermost(self)

    def leave_thread(self) -> None:
        """Watch no more in this thread, which ends."""
        self.leave()
        if self.standby is not None:
            modes.leave(self.standby.guard)

    def backward_begins(
        self, roots: tuple[Tensor, ...], *, another_watches: bool, makes_graph: bool = False
    ) -> None:
        """Stop watching, unless weights are away of which no other mode tells that they are read, or the call `makes_graph`, and is forward to
        the next one; where the mode stays on, formulas below `roots` that look for one find none of memopt's."""
        if self.weights is not None:
            self.weights.forward_ended()
        if makes_graph:
            self.values.gradients_begin()
        else:
            self.values.gradients_end()
            self._stop_watching(roots, another_watches)
        self._makers.forget()
        awake = self.standby is not None and not self.standby.guard.rests
        if awake or modes.is_on(self):
            run_as_plain(roots)

    def _stop_watching(self, roots: tuple[Tensor, ...], another_watches: bool) -> None:
        weights = self.weights
        if another_watches or weights is None or not weights.any_away:
            self._leave()
        elif current_mode() is self and weights.reads_are_pythons(roots):
            self._leave()
            weights.python_reads.begin()

    def backward_ended(self) -> None:
        """Watch every op again."""
        if self.weights is not None:
            self.weights.python_reads.end()
        self.changing.backward_ended()
        self.enter()

    def stop(self) -> None:
        """Enforce nothing from here on; what has been taken away is still given back when it is asked for."""
        self.active = self._asleep = False
        if self in self._frames.sleepers:
            self._frames.sleepers.remove(self)
        self._unsettled.clear()
        self._later.clear()
        modes.leave(self)
        if self.weights is not None:
            self.weights.python_reads.end()
        if self.standby is not None:
            self.standby.guard.end()

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = as_plain(func)
        iterations, weights = self._iterations, self.weights
        if weights is not None and weights.any_away:
            weights.before(func, args, kwargs)
        plain = not types or _PLAIN_TYPES.issuperset(types)
        if iterations.in_backward:
            return self._in_backward(func, run, args, kwargs) if plain else run(*args, **kwargs)
        if not self.active:
            return run(*args, **kwargs)
        if iterations.in_step and not torch.is_grad_enabled():
            changing = self.changing
            return changing.run(func, run, args, kwargs) if changing.sees_writes else run(*args, **kwargs)
        if self._regions.compiling or not self._thread.is_here:
            return run(*args, **kwargs)
        if not plain:
            goes_on = self.capturing.now() or just_goes_on(types)
            return run(*args, **kwargs) if goes_on else NotImplemented
        kind = kind_of(func)
        if kind.is_view or self.capturing.now():
            return run(*args, **kwargs)
        if self._swapper is not None:
            self._swapper.collect()
        frame = self._frames.current
        to_do = self._to_do_in(frame)
        op = None
        recorded = copies = False
        if to_do is not NOTHING:
            name = kind.name
            op = (name, frame.next_op(name))
            if op in to_do.due_ops and self._swapper is not None:
                self._swapper.wait_until_away(to_do.due_ops[op])
            recorded = op in to_do.ops and not frame.diverged and not self._is_idle
            copies = name == CLONE and op in to_do.clones
            self._called = describe_call(name, func, args, kwargs) if name in to_do.readers else None
        elif self._called is not None:
            self._called = None
        if recorded or self._unsettled or kind.changes:
            out = self._watch(func, run, kind, args, kwargs, recorded)
        else:
            out = run(*args, **kwargs)
        if copies:
            self._copied(func, kind, args, kwargs, out)
        if op is not None and op in to_do.lets_go:
            self._let_go_now(to_do.lets_go[op])
        if weights is not None:
            weights.settle()
            if op is not None and op in to_do.leaves and not frame.diverged:
                self._let_weights_leave(weights, frame, op, to_do.leaves[op], (*args, *kwargs.values()))
        return out

    def _to_do_in(self, frame: Frame) -> InCall:
        found: InCall = frame.to_do
        if found is None:
            found = frame.to_do = self._tables.of(frame.key)
            if self.weights is not None and self.active:
                self._let_uncalled_leave(self.weights, frame)
        return found

    def _in_backward(self, func: Any, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if goes_into_first(func, args, kwargs, self._makers.of):
            return in_place(func)(*args, **kwargs)  # as autograd does where no mode watches
        out = run(*args, **kwargs)
        self._makers.made(out)
        return out

    def _let_go_now(self, actions: list[int]) -> None:
        """The last op has run for which these had to stay. What nobody holds any more has left by itself."""
        for action in actions:
            for handle in [reference() for reference in self._later.pop(action, ())]:
                if handle is None:
                    self.account.done[action] += 1
                elif handle.tensor is not None and handle.content is None:
                    self._letting_go.act(handle, None)

    def _let_weights_leave(
        self,
        weights: WatchedWeights,
        frame: Frame,
        op: tuple[str, int],
        actions: list[int],
        arguments: tuple[Any, ...],
    ) -> None:
        for action in actions:
            planned = self.actions[action]
            first = planned.leaves_after
            again = first is None or (first.module, first.name, first.ordinal) != (frame.key, *op)
            told = functools.partial(self._weight_left, action)
            if not again:
                weights.uncalled.left(action, frame)
            if why := self.capturing.why_keep():
                told(why)
                continue
            weights.leave(
                action,
                planned.size_bytes,
                arguments,
                again=again,
                unrecorded=frame.without_gradients,
                told=told,
            )

    def _let_uncalled_leave(self, weights: WatchedWeights, frame: Frame) -> None:
        """The call after which these leave is not made in this iteration."""
        for action in weights.uncalled.begins(frame):
            weights.uncalled.left(action, frame)
            if not self.capturing.why_keep():
                told = functools.partial(self._weight_left, action)
                weights.leave_uncalled(action, self.actions[action].size_bytes, told)

    def _weight_left(self, action: int, why_not: str) -> None:
        if why_not:
            self.account.decline(action, why_not)
        else:
            self.account.done[action] += 1

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
                self.values.source_changes(storage_of(statistics)._cdata, but=record)
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
            self.account.other_bits.add(kind.name)
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
        if self.values.value_in(args[0], storage_of(args[0])) is None:
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
        standby = self.standby
        if standby is not None:
            # whether this one leaves is not known yet
            size_bytes = tensor.nbytes
            standby.saved(size_bytes, self.saved_bytes + size_bytes, self.saved_bytes - self._leaving_bytes)
        self.saved_tensors += 1
        self.saved_elements += tensor.numel()
        self.saved_bytes += tensor.nbytes
        frame = self._frames.current
        ordinal = frame.packs
        frame.packs = ordinal + 1
        if self._asleep:
            self.enter()
        to_do = self._to_do_in(frame)
        if to_do is NOTHING:
            return Kept(tensor) if standby is None else standby.guard.pack(tensor)
        due, slot = to_do.due.get(ordinal), to_do.slots.get(ordinal)
        keep = self.capturing.why_keep() if due is not None or slot is not None else ""
        if due is not None and self._swapper is not None and not keep:
            self._swapper.wait_until_away(due)
        if slot is None or frame.diverged or self._is_idle:
            kept = Kept(tensor) if standby is None else standby.guard.pack(tensor)
            kept.brings = None if self._is_idle else to_do.at_use.get(ordinal)
            return kept
        keep = keep or self._streams.why_keep(tensor.device)
        if keep:
            self.account.decline(slot.action, keep)
            return Kept(tensor)
        if not self._fits(tensor, slot):
            self._diverged(frame)
            return Kept(tensor) if standby is None else standby.guard.pack(tensor)
        if is_lent(storage_of(tensor)):
            self.account.decline(slot.action, "its bytes are numpy's or a file's, which may change unseen")
            return Kept(tensor)
        handle = Planned(tensor, slot)
        self._leaving_bytes += tensor.nbytes
        if slot.later:
            self._later.setdefault(slot.action, []).append(weakref.ref(handle))
        elif slot.ref.is_output and slot.ref.node:
            own = tensor.grad_fn is None or tensor.grad_fn.name() == slot.ref.node  # indices have no node
            self._letting_go.act(handle, self._called if own else None)
        else:
            self._unsettled.append(handle)
        return handle

    @property
    def _is_idle(self) -> bool:
        """Has the guard beside the plan this iteration for itself?"""
        return self.standby is not None and self.standby.alone

    @staticmethod
    def _fits(tensor: Tensor, slot: PlannedSlot) -> bool:
        return tensor.dim() == slot.ref.dims and dtype_name(tensor.dtype) == slot.ref.dtype

    def unpack(self, handle: Kept | Planned) -> Tensor:
        """The hook: the tensor, made again, read back or decoded. May be called again (`retain_graph`)."""
        weights = self.weights
        if weights is None:
            return self._unpack(handle)
        rests = python_reads.rest()
        try:
            tensor = self._unpack(handle)
            weights.asked(tensor)
        finally:
            python_reads.go_on(rests)
        return tensor

    def _unpack(self, handle: Kept | Planned) -> Tensor:
        if isinstance(handle, Kept) and self.capturing.now():
            return handle.get()
        if self._swapper is not None and self.active:
            self._swapper.collect()
            if self.weights is not None:
                self.weights.settle()
        if isinstance(handle, Kept):
            self._bring_about(handle.brings)
            return handle.get() if self.standby is None else self.standby.guard.unpack(handle)
        ref = handle.slot.ref
        self._bring_about(self._tables.of(ref.module).at_use.get(ref.ordinal))
        if handle.witness is not None:
            check_version(handle.witness, handle.version, handle, shape=handle.place.size)
        if handle.tensor is not None:
            check_version(handle.tensor, handle.version, handle)
            return handle.tensor
        if self.standby is None:
            return self._letting_go.restore(handle)
        here = self._letting_go.here(handle)
        return self.standby.guard.counted(handle.place, lambda: self._letting_go.restore(handle), here)

    def _bring_about(self, moment: AtUse | None) -> None:
        """What the plan has happen when a slot is asked for: room is made before it is taken."""
        if moment is None:
            return
        if self._swapper is not None:
            if moment.number >= 0 and self._swapper.feedback is not None:
                self._swapper.feedback.reach(moment.number)
            if moment.due:
                self._swapper.wait_until_away(moment.due)
            self._swapper.prefetch(moment.prefetch)
        if moment.make:
            self._letting_go.make_ahead(moment.make)

    # --- actions

    def _settle(self, call: Call | None) -> None:
        """A call has been made: act on what was packed before it."""
        waiting, self._unsettled = self._unsettled, []
        for handle in waiting:
            self._letting_go.act(handle, call)

    def settle_all(self) -> None:
        """Forward is over: act on what is left, except where the op had to be seen."""
        if self.saved_tensors > DEEP:
            make_room()  # `pack` has looked at the nodes of outputs
        self._settle(None)

    def _diverged(self, frame: Frame) -> None:
        if not frame.diverged:
            frame.diverged = True
            self.divergences += 1
            if self.standby is not None:
                here = {each.action for each in self._to_do_in(frame).slots.values()}
                self.standby.stays(sum(self.actions[each].size_bytes for each in here))

    # --- the loop

    def new_iteration(self) -> None:
        """Forget what ended with the iteration."""
        self.account.done.clear()
        self._later.clear()
        self.changing.new_iteration()
        self._makers.forget()
        self._letting_go.new_iteration()
        self._streams.new_iteration()
        self.saved_tensors = self.saved_elements = self.saved_bytes = self._leaving_bytes = 0
        self.values.new_iteration()
        if self.weights is not None:
            self.weights.new_iteration()
        if self._swapper is not None:
            self._swapper.new_iteration()
        if self.standby is not None:
            self.standby.new_iteration()
