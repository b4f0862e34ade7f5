"""The guard: holds a run within a budget without a plan, by moving saved tensors away while it runs.

Before an op that would take live bytes past the budget, saved storages that only autograd holds leave for a tier, and come back when
backward asks. Which: those that were saved first, for backward asks for them last; where a copy costs as much for every byte, cost over
bytes and staleness (Dynamic Tensor Rematerialization, Kirisame et al., ICLR 2021) is their staleness. As in MegEngine's form of it small
tensors are left out. What DTR does and this does not: recompute; nothing is done about state, or about what one op needs by itself.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn import Parameter

from memopt.enforcers.capturing import Capturing
from memopt.enforcers.guarding.expected import Expected, Key, Op
from memopt.enforcers.guarding.live_bytes import Live
from memopt.enforcers.guarding.makers import Makers
from memopt.enforcers.guarding.movable import Movable
from memopt.enforcers.guarding.passed import Passed
from memopt.enforcers.guarding.sleep import Sleep
from memopt.enforcers.guarding.watched import Watched
from memopt.enforcers.guarding.whole_budget import WholeBudget
from memopt.enforcers.tiers.swap import SwapTier
from memopt.instrument import modes
from memopt.instrument.accumulate import goes_into_first, in_place
from memopt.instrument.as_plain import as_plain, is_looking, run_as_plain
from memopt.instrument.loop import Loop
from memopt.instrument.memory.held import held_bytes
from memopt.instrument.one_stream import OneStream
from memopt.instrument.ops import PLAIN_TYPES, is_lent, is_plain, just_goes_on, kind_of
from memopt.instrument.saved import Kept, Place, SavedTensorHooks, share
from memopt.instrument.script.forks import call_around_fork
from memopt.instrument.stepping.gradient_reads import is_leaf
from memopt.instrument.torch_internals import DisableTorchDispatch, DisableTorchFunction, storage_of
from memopt.workspaces import ON_A_CPU, Calls, workspace_bytes

_PLAIN_TYPES = frozenset(PLAIN_TYPES)

LEAST_BYTES = 64 * 1024
"""Smaller storages stay, unless they are more than a share of the budget."""
_LEAST_SHARE = 256
"""Of the budget, this part."""
_PAGE_BYTES = 4096
_MOST_BEFORE = 16


class Guard(modes.Mode):
    """The mode and the hooks; a listener of the loop that it is given."""

    def __init__(
        self,
        loop: Loop,
        tier: SwapTier[Any],
        device: str,
        budget_bytes: int,
        *,
        rests: bool = False,
        whole: bool = False,
    ) -> None:
        """`rests`: until it is woken saved tensors are noted, and nothing is counted or moved. `whole`: the budget is for all that the
        process has on its GPU, the context and kernels too."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._frames, self._iterations, self._tier = loop.frames, loop.iterations, tier
        self._thread, self._regions = loop.frames.thread, loop.frames.regions
        self.device, self.budget_bytes = device, budget_bytes
        self._whole = WholeBudget(budget_bytes) if whole and device == "cuda" else None
        self._least_bytes = min(LEAST_BYTES, max(_PAGE_BYTES, budget_bytes // _LEAST_SHARE))
        self._is_watched: Callable[[Tensor], bool] = attrgetter(f"is_{device}")
        self._live = Live(device) if rests else Live(device).look_around()
        self._expected = Expected()
        self.workspaces: Mapping[str, Calls] = ON_A_CPU if device == "cpu" else {}
        """What ops take beside their results: as kernels do in general, until a profile has shown it."""
        self._held_at: dict[Key, int] = {}
        """Most that was live as it ended, while that was not known."""
        self._most_with_workspaces = 0
        self.most_without_gradients = self._most_before_it = self._most_before = 0
        """The most that was live in calls without gradients which are told apart, before the one that goes on, and before this iteration."""
        self._about_bytes = 0
        """What the op that is about to run takes."""
        self._hooks = SavedTensorHooks(self.pack, self.unpack)
        self.sent: Callable[[], None] | None = None
        """Waits until what that plan has sent away is away: it leaves sooner than what is sent now."""
        self.last_resort: Callable[[], None] = lambda: None
        """Frees what the guard does not move itself, where it has nothing left and the optimizer is not stepping."""
        self.goes_on: Callable[[], None] = lambda: None
        """Told that an iteration has saved its first tensor."""
        self.state_is_back: Callable[[bool], None] = lambda is_back: None
        """Told that the script looks at optimizer state, and that this has left again."""
        self._makers = Makers()
        self._capturing = Capturing(device)
        self._streams = OneStream()
        self.movable = Movable(tier, self._live, self._streams, device)
        self.active = True
        self.rests = rests
        self._sleep = Sleep(device, budget_bytes)
        loop.frames.sleepers.append(self)
        self._waits = False
        """No tensor has been saved yet."""
        self._began_bytes = 0
        """What there was when training began, if it has waited for that."""
        self.after_backward = False
        """Nothing has been saved since a backward call ended."""
        self._looking = False
        """An op has run whose backward formula looks whether a mode is on."""
        self._sizes_now: list[int] = []
        self.last_sizes: list[int] = []
        """How many elements each of the tensors has that autograd saved in the last iteration."""
        self.saved_before: list[tuple[int, int]] = []
        """For each of the first iterations how many tensors autograd saved, and their elements."""
        self.passed = Passed(loop.frames, device)
        self.most_at_looks = 0
        """Most that was live where the script looked at optimizer state or gradients that were away, while the guard rested."""
        self._most_given_out = 0
        """By the allocators at such a look, when it was asked how much of that is tensors: that takes longer than many a step."""
        self._collects = self._may_collect = True

    # --- life

    @property
    def moved(self) -> int:
        """Storages that have left."""
        return self.movable.moved

    @property
    def moved_bytes(self) -> int:
        return self.movable.moved_bytes

    @property
    def most_bytes(self) -> int:
        """Most that was live, as far as it was seen."""
        return max(self._live.most, self._most_with_workspaces)

    def without_gradients(self, begins: bool) -> None:
        """The call of a module without gradients begins, or has ended: what is live meanwhile is told apart."""
        live = self._live
        if begins:
            self._most_before_it, live.most = live.most, live.now()
        else:
            self.most_without_gradients = max(self.most_without_gradients, live.most)
            live.most = max(self._most_before_it, live.now())

    def evaluation_ended(self) -> None:
        """What was live in this iteration so far was an evaluation's."""
        live = self._live
        if live.most > self._most_before:
            self.most_without_gradients = max(self.most_without_gradients, live.most)
            live.most = max(self._most_before, live.now())

    @property
    def next_bytes(self) -> int:
        """About what the next iteration comes to at most: the first one leaves the optimizer's state, and gradients."""
        kept = self._live.now() - self._began_bytes if self._began_bytes else 0
        return self.most_bytes + max(0, kept)

    def bytes_now(self) -> int:
        """Bytes that are live now."""
        return self._live.now() if self._counts else self.tensor_bytes()

    def tensor_bytes(self) -> int:
        """The same, by a look at all there is."""
        return Live(self.device).look_around().now()

    def learn(self, workspaces: Mapping[str, Calls]) -> None:
        """A profile has shown what ops take beside their results: those that have run took it as well."""
        self.workspaces = workspaces
        for key, held in self._held_at.items():
            if calls := workspaces.get(key[0]):
                came_to = held + workspace_bytes(calls, key[1] + self._expected.last(key))
                self._most_with_workspaces = max(self._most_with_workspaces, came_to)
        self._held_at.clear()

    @property
    def why_no_more(self) -> str:
        """Why moving has freed nothing, or ended; empty where neither is so."""
        failure = self._tier.failure
        if failure is None:
            return self._tier.frees_nothing
        return f"{failure.words}, and nothing was moved from there on"

    def begin(self, *, waits: bool = False) -> None:
        """Watch from here on, or, if it `waits`, from the first forward that trains: until then there is nothing to move, and preparation
        runs at its own speed."""
        self._waits = waits
        self._leave_room_for_the_context()
        if waits:
            self._frames.before_training = self._training_begins
        self._most_before = self._live.most
        self._hooks.install()
        self._enter()
        call_around_fork(self._fork, self._fork, self._forked)

    def _fork(self) -> None:
        """Nothing: the tier's threads and locks are not ours to stop."""

    def _forked(self) -> None:
        """A forked child (a loader's worker) has its own memory, and nothing of the tier."""
        self.active = False

    def end(self) -> None:
        """Move nothing from here on; what is away comes back when it is asked for."""
        self.active = self._waits = False
        modes.leave(self)
        self._hooks.remove()
        if self in self._frames.sleepers:
            self._frames.sleepers.remove(self)
        self.movable.forget_all()

    def wake(self) -> None:
        """Hold the budget from here on, be it in the midst of an iteration."""
        if self.rests and self.active:
            self.rests = False
            self._look_around()
            self._enter()

    def aside(self) -> None:
        """Another mode tells of ops from here on (`begins`, `ended`), until `back`: two would hold each gradient that one may write over."""
        modes.leave(self)

    def back(self) -> None:
        """Watch again, if it did."""
        self._enter()

    def rest(self) -> None:
        """Note saved tensors, and no more, until it is woken; at an iteration boundary."""
        self.rests = True
        modes.leave(self)

    def _enter(self) -> None:
        self._sleep.is_over()
        if self.active and not self._waits and not self.rests:
            modes.enter(self)

    def _sleep_or_enter(self) -> None:
        """An iteration has ended: ops are watched again from the next call of a module on, or the first saved tensor. What comes before (a batch
        is made of hundreds of images) has nothing that could be moved, unless a graph lives on."""
        self._sleep.was_there = False
        if self.movable or not self._counts or not self._sleep.may_begin(self._live):
            self._enter()
        elif not self._sleep.goes_on:
            self._sleep.begin()
            modes.leave(self)

    def call_begins(self, module: nn.Module, name: str, args: object) -> None:
        """`Frames` tells of it. A module without parameters makes data ready, or has its own saved tensors tell of it."""
        if self._sleep.goes_on:
            with DisableTorchFunction():
                has_parameters = any(True for _ in module.parameters())
                if has_parameters:
                    self._live.met_among((args,))
            if has_parameters:
                self._wake_up()

    def evaluated(self) -> None:
        """`Frames` tells of it: before the training goes on a batch may be made."""
        if self._counts and not self._sizes_now and not self._iterations.in_backward:
            self._sleep_or_enter()

    def _wake_up(self) -> None:
        if self._sleep.goes_on:
            if self._counts:
                self._sleep.count_unseen(self._live)
            self._enter()

    def _training_begins(self) -> None:
        if self._waits:
            self._waits = False
            self._leave_room_for_the_context()
            self._look_around()
            self._began_bytes = self._live.now()
            self._enter()

    def _look_around(self) -> None:
        self._sleep.looked_around(self._live.look_around())

    def _leave_room_for_the_context(self) -> None:
        if self._whole is not None:
            self.budget_bytes = self._whole.for_tensors()

    # --- ops

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = as_plain(func)
        if not self.active or self.rests or self._regions.compiling or self._capturing.now():
            return run(*args, **kwargs)
        if not _PLAIN_TYPES.issuperset(types):
            return run(*args, **kwargs) if just_goes_on(types) else NotImplemented
        kind = kind_of(func)
        if kind.is_view:
            return run(*args, **kwargs)
        self._looking = self._looking or is_looking(kind.name)
        in_backward = self._iterations.in_backward
        if in_backward and goes_into_first(func, args, kwargs, self._makers.of):
            return in_place(func)(*args, **kwargs)  # as autograd does where no mode watches
        if self._sleep.was_there and not in_backward:
            self._live.met_among(args)
        op = self.begins(func, args, kwargs)
        out = run(*args, **kwargs)
        self.ended(op, out)
        if in_backward:
            self._makers.made(out)
        return out

    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        """An op is about to run: make room for what it will make."""
        name = kind_of(func).name
        op = self._expected.of(name, func, args, kwargs)
        calls = self.workspaces.get(name)
        self._about_bytes = op.makes + (workspace_bytes(calls, op.key[1] + op.makes) if calls else 0)
        self._make_room(self._about_bytes, name)
        return op

    def ended(self, op: Op, out: Any) -> None:
        """It has given `out`."""
        self._about_bytes = 0
        self._expected.made(op, self._live.made(out))
        if self.workspaces is ON_A_CPU and self._live.bytes > self._held_at.get(op.key, 0):
            self._held_at[op.key] = self._live.bytes
        self._make_room(0, op.key[0])

    # --- saved tensors

    def pack(self, tensor: Tensor) -> Kept:
        """The hook: a handle that may send its bytes away."""
        if not self.active or self._iterations.in_backward or not self._thread.is_here:
            return Kept(tensor)
        if not self._is_watched(tensor) or not is_plain(tensor) or self._capturing.why_keep():
            return Kept(tensor)
        if not self._sizes_now:
            self.goes_on()
        self.after_backward = False
        self._sizes_now.append(tensor.numel())
        if self._waits or self._sleep.goes_on:  # a script without modules
            self._training_begins()
            self._wake_up()
            self._looking = True  # this op may be one, and is not seen
        if self._streams.why_keep(tensor.device):
            return Kept(tensor)
        storage = storage_of(tensor)
        if (
            storage.nbytes() < self._least_bytes
            or is_lent(storage)
            or (tensor.requires_grad and is_leaf(tensor))
            or isinstance(tensor._base, Parameter)
        ):
            return Kept(tensor)
        if self.device == "cpu" and not self.rests:
            self._live.met(storage)
        return self.movable.keep(tensor, storage)

    def unpack(self, handle: Kept) -> Tensor:
        """The hook: the tensor, wherever it was."""
        guard = DisableTorchDispatch()
        try:
            if not isinstance(handle, Watched) or self.rests:
                return handle.get()
            if handle.away is None:
                return share(handle.get())  # what the node uses from now on must not leave before its op
            if not self.movable.is_asked_for(handle) and self.active:
                self._make_room(handle.size_bytes, "a saved tensor")
            tensor = handle.get()
            if self.active:
                self.movable.look_ahead(self.budget_bytes - self._live.now())
            return tensor
        finally:
            del guard

    def counted(
        self, place: Place, restore: Callable[[], Tensor], here: UntypedStorage | None = None
    ) -> Tensor:
        """What a plan's `restore` gives for a saved tensor at `place`: it makes it unseen, unless its bytes are `here` already."""
        if self.rests or not self.active:
            return restore()
        if here is not None:
            self.held_again(here)
        self._make_room(
            0 if here is not None else math.prod(place.size) * place.dtype.itemsize, "a saved tensor"
        )
        tensor = restore()
        self.held_again(storage_of(tensor))
        return tensor

    def held_again(self, storage: UntypedStorage) -> None:
        """Somebody has made `storage` unseen, and holds it."""
        if self.device == "cpu" and not self.rests:
            self._live.met(storage)

    # --- weights that are away (Room)

    def has_room(self, size_bytes: int) -> bool:
        """For a weight that nobody has asked for yet."""
        return not self._counts or self._above(size_bytes + self._about_bytes) <= 0

    def make_room(self, size_bytes: int) -> None:
        """A weight is about to come back, which an op waits for."""
        if self._counts:
            self._make_room(size_bytes + self._about_bytes, "a weight")

    def resized(self, storage: UntypedStorage) -> None:
        """A weight has come back, or has left."""
        if self.device == "cpu" and self._counts:
            self._live.resized(storage)

    def looked_at(self, size_bytes: int) -> None:
        """Optimizer state comes back between steps, or gradients have, which no plan foresees: room is made for it, or it is noted how much there
        is then."""
        if size_bytes:
            self.state_is_back(True)
        if self._counts and self._thread.is_here:
            what = "optimizer state or gradients came back, as the script looked at them (a checkpoint, say)"
            self._make_room(size_bytes, what, trains=False)
        elif self.active:
            given_out = held_bytes(self.device)
            if not given_out or given_out + size_bytes > max(self.budget_bytes, self._most_given_out):
                self._most_given_out = given_out + size_bytes
                self.most_at_looks = max(self.most_at_looks, self.tensor_bytes() + size_bytes)

    def leaves_again(self) -> None:
        """Optimizer state that the script has looked at is away again."""
        self.state_is_back(False)

    @property
    def _counts(self) -> bool:
        return self.active and not self.rests and not self._waits

    # --- room

    def _above(self, need_bytes: int) -> int:
        """By how much `need_bytes` more pass the budget; 0 or less where they do not."""
        return self._live.now() + need_bytes - self.budget_bytes

    def _make_room(self, need_bytes: int, what: str, *, trains: bool | None = None) -> None:
        """Move what was saved first, until `need_bytes` more are within the budget. `trains`: as `Passed.by`; None: as what goes on tells."""
        over = self._above(need_bytes)
        if over > 0 and self.sent is not None:
            self.sent()
            over = self._above(need_bytes)
        if over <= 0:
            return
        over = self._move_away(need_bytes) if self.movable else over
        if over > 0 and self._may_collect:
            over = self._collect_garbage(need_bytes)
        if over > 0 and self._thread.is_here and not self._iterations.in_step:
            self.last_resort()
            over = self._above(need_bytes)
        iterations = self._iterations
        if trains is None:
            trains = torch.is_grad_enabled() or iterations.in_backward or iterations.in_step
        after_backward = self.after_backward and not iterations.in_backward
        self.passed.by(over, need_bytes, what, trains=trains, after_backward=after_backward)

    def _collect_garbage(self, need_bytes: int) -> int:
        """Tensors in reference cycles may be all that is left; at most once an iteration, and no more where that frees nothing. What is still
        above the budget then."""
        before = self._live.now()
        self._may_collect = False
        gc.collect()
        self._collects = self._live.now() < before
        return self._above(need_bytes)

    def _move_away(self, need_bytes: int) -> int:
        """What is still above the budget then."""
        guard = DisableTorchDispatch()
        try:
            self.movable.send_back()
            self._tier.collect()
            over = self.movable.send(self._above(need_bytes))
            self._tier.collect()
        finally:
            del guard
        return over

    # --- the training loop (Listener)

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        if self._whole is not None:
            self._whole.iteration_ended()
        self.new_iteration()
        self._frames.new_iteration()

    def new_iteration(self) -> None:
        """What ended with the one before is forgotten; graphs that live on stay known."""
        self._leave_room_for_the_context()
        self.movable.new_iteration()
        if len(self.saved_before) < _MOST_BEFORE:
            self.saved_before.append((len(self._sizes_now), sum(self._sizes_now)))
        self.last_sizes, self._sizes_now = self._sizes_now, []
        self._makers.forget()
        self.passed.new_iteration()
        self._may_collect = self._collects
        self._streams.new_iteration()
        self._most_before = self._live.most
        self._sleep_or_enter()

    def thread_changed(self) -> None:
        self._frames.thread_changed()
        self._hooks.thread_changed()
        self._frames.thread.at_end(self._leave_thread)

    def _leave_thread(self) -> None:
        modes.leave(self)
        self._hooks.leave_thread()

    def backward_begins(self, roots: tuple[Tensor, ...], *, keep_graph: bool, create_graph: bool) -> None:
        self._frames.paused = True
        if self._looking:
            run_as_plain(roots)

    def backward_ended(self) -> None:
        self.after_backward = True
        self._makers.forget()
        self._frames.paused = False

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        return None
