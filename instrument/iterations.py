"""Iteration boundaries of an unmodified training loop, found from outside.

An iteration is the span between two consecutive steps of one optimizer: the one that steps last in the script's first round,
since a graph that two optimizers share (a GAN's generator) then lives inside one iteration; a round may have several steps of
one (a critic's) before another's. When others step for long without it (a next phase of training), one of them takes its place.
Gradient accumulation, several optimizers and evaluation between steps come out right. Where no optimizer object exists
(`p.data.add_`), the end of each backward call is the boundary; where optimizers step inside backward (a hook on each parameter), the
end of those that had a step.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.optim import optimizer as optim

from memopt.instrument.live_objects import living
from memopt.instrument.script.run_queue import Stretch
from memopt.instrument.script.training_thread import TrainingThread
from memopt.instrument.stepping.gradient_check import checks_gradients
from memopt.instrument.stepping.torchs_step import any_was_made, calls_closure_first, steps_under_way
from memopt.instrument.stepping.updates_by_hand import UpdatesByHand
from memopt.instrument.torch_internals import current_graph_task, engine_run_backward, set_engine_run_backward

_MOST_BACKWARDS_A_STEP = 1024
"""A script that has called backward this often and never stepped the optimizer it made is divided by backward calls."""


_MOST_ROUNDS = 16
"""An optimizer that was there at the first step of all is waited for while the one that steps has ended fewer rounds than this."""


_TIMED = 30
"""Iterations at whose end a GPU is waited for: a loop that reads nothing back runs ahead of it, and would be timed as it launches. Later
the queue is full, and it launches as fast as the GPU computes."""


class Listener(Protocol):
    """Told of what the training loop does. All calls come from the thread that trains."""

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        """`milliseconds`: without those for which the thread waited for a processor."""

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None: ...
    def backward_ended(self) -> None: ...
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to update; where it was given a closure, and calls that first of all, when that has returned."""

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None: ...
    def thread_changed(self) -> None:
        """The script trains in this thread from now on: what torch keeps for each thread by itself is not here yet."""


class Iterations:
    """Watches optimizer steps and backward calls, and tells one listener."""

    def __init__(
        self, listener: Listener, thread: TrainingThread | None = None, *, optimizers: int = 0
    ) -> None:
        """`optimizers`: how many step in the first round, where an earlier run has shown it; the first iteration waits for them."""
        self._optimizers = optimizers
        self._joined = 0
        """How many optimizers had stepped when the one whose steps end iterations joined them; 0 where it began a phase of its own."""
        self._steps = 0
        """Of all optimizers, until then."""
        self._listener = listener
        self._thread = thread or TrainingThread()
        self._chosen: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer whose steps end iterations."""
        self.rounds = 0
        """Iterations that the optimizer whose steps end them has ended; 1 again when another one has taken its place."""
        self._others_steps = 0
        """Steps of others since it has ended one."""
        self._most_others_steps = 0
        """Of any of its rounds."""
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._expected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers of other parameters that were there when the first one stepped."""
        self._first: torch.optim.Optimizer | None = None
        """That one, until they have been looked for."""
        self.elsewhere = 0
        """Backward calls in threads of the script's beside the one that trains: nobody watches those."""
        self._after_backwards = False
        """Backward calls had ended iterations before it first stepped."""
        self._warmed_up = False
        """Not only the one that it stepped after."""
        self._shares_backward = False
        """It first stepped after the backward call of one that had ended an iteration: Pyro makes an optimizer for each parameter."""
        self._backward_since = False
        """Backward has been called since an iteration ended."""
        self._pid = os.getpid()
        self._stretch = Stretch()
        self._took_ms = self._waited_ms = 0.0
        self._backwards = 0
        self._by_hand = UpdatesByHand()
        self._depth = 0
        self.accumulates = True
        """The last backward call left gradients behind, as `torch.autograd.grad` does not."""
        self._steps_open = 0
        self.step_has_closure = False
        """The step that begins was given one, and has not called it yet."""
        self.asking: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers whose steps have called backward by themselves, not by a closure (AdaHessian)."""
        self.stepping: weakref.ref[torch.optim.Optimizer] | None = None
        """The one whose step has begun last."""
        self._stepped_inside = False
        """An optimizer has stepped during the backward call that is running."""
        self._inside: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped during one: they do not move the boundary where another steps after it."""
        self._handles: list[Any] = []
        self._run_backward: Callable[..., Any] | None = None
        self.count = 0
        """Iterations that have ended."""
        self.boundary = ""
        """`optimizer` or `backward` once it is known."""

    @property
    def in_backward(self) -> bool:
        """Not in a call that makes a graph of its own (`create_graph`): what that computes and saves is forward to the backward call that
        goes through it."""
        return self._depth > 0 and not self._thread.backward_makes_graph

    @property
    def chosen(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps end iterations."""
        return self._chosen() if self._chosen is not None else None

    @property
    def stepped(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped and live."""
        return list(self._stepped | self._inside)

    @property
    def steps_inside(self) -> bool:
        """Have optimizers stepped inside backward?"""
        return bool(self._inside)

    @property
    def waits_for_another(self) -> bool:
        """May an optimizer still move the boundary: one of a round that is not over, or, where iterations have ended with backward calls,
        the first? A script that updates nothing may check gradients, or warm up, before it makes one."""
        if self.boundary == "backward":
            return self.count < _MOST_ROUNDS and not self._by_hand.seen
        self._look_for_others()
        return self.rounds < _MOST_ROUNDS and any(
            each not in self._stepped and each not in self._inside for each in self._expected
        )

    @property
    def waits_until(self) -> int:
        """Backward calls that end iterations, until no first optimizer is waited for any more; 0 where none is."""
        waits = self.boundary == "backward" and not self._by_hand.seen
        return _MOST_ROUNDS if waits and self.count <= _MOST_ROUNDS else 0

    @property
    def came_late(self) -> bool:
        """Does the optimizer whose steps end iterations make parts of the first one of those that had ended before?"""
        return self._after_backwards or self._shares_backward or self.chosen in self._expected

    @property
    def more_may_join(self) -> bool:
        """Is this the first round of optimizers that step after one backward call, each made as it first steps, and may there be more of them?"""
        return self._shares_backward and self.rounds == 1

    @property
    def _is_left_behind(self) -> bool:
        """Has the script gone on to another phase, without the optimizer whose steps have ended iterations so far?"""
        usual = 2 * self._most_others_steps + 1
        return self._others_steps > (usual if self.rounds > 1 else max(usual, _MOST_ROUNDS))

    @property
    def in_first_round(self) -> int:
        """How many optimizers step in the first round; 0 where its last one joined after more steps than there are in later ones, and where backward
        calls had ended iterations before the one that it steps after (a warm-up): a run that waits for it would count those to its first one."""
        return self._joined if self._steps <= self._most_others_steps and not self._warmed_up else 0

    @property
    def _round_is_not_over(self) -> bool:
        """Are optimizers yet to step in the first round? Not waited for without end: this run may go another way than the earlier one."""
        return len(self._stepped) < self._optimizers and self._others_steps < _MOST_ROUNDS * self._optimizers

    @property
    def nested(self) -> bool:
        """Was backward called inside backward, as reentrant `checkpoint` does?"""
        return self._depth > 1

    @property
    def waited_share(self) -> float:
        """Of the time of all iterations: what the thread waited for a processor."""
        return self._waited_ms / self._took_ms if self._took_ms else 0.0

    @property
    def in_step(self) -> bool:
        return self._steps_open > 0

    def install(self) -> None:
        self._stretch.begin()
        self._handles = [
            optim.register_optimizer_step_pre_hook(self._before_step),
            optim.register_optimizer_step_post_hook(self._after_step),
        ]
        original = engine_run_backward()
        self._run_backward = original

        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._ours():
                self.elsewhere += not isinstance(threading.current_thread(), threading._DummyThread)
                return original(t_outputs, *args, **kwargs)
            self._before_backward(t_outputs, args, kwargs)
            try:
                return original(t_outputs, *args, **kwargs)
            finally:
                self._after_backward()

        set_engine_run_backward(_engine_run_backward)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._run_backward is not None:
            set_engine_run_backward(self._run_backward)

    def _ours(self) -> bool:
        if os.getpid() != self._pid:
            return False
        if self._thread.taken_here():
            self._listener.thread_changed()
        return self._thread.is_here

    def _before_backward(self, roots: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._backward_since = True
        self.accumulates = bool(kwargs.get("accumulate_grad", True))
        tensors = tuple(root for root in roots if isinstance(root, torch.Tensor))
        keep_graph = bool(args[1]) if len(args) > 1 else False
        create_graph = bool(args[2]) if len(args) > 2 else False
        self._thread.backward_makes_graph = create_graph
        stepping = self.stepping() if self.stepping is not None and self.in_step else None
        if stepping is not None and not self.step_has_closure:
            self.asking.add(stepping)
        self._listener.backward_begins(tensors, keep_graph=keep_graph, create_graph=create_graph)

    def _after_backward(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._thread.backward_makes_graph = False
        self._listener.backward_ended()
        stepped_inside, self._stepped_inside = self._stepped_inside, False
        if self._chosen is not None or self._steps_open or checks_gradients():
            return
        if stepped_inside:
            self.boundary = "optimizer"
            self._end_iteration()
            return
        self._backwards += 1
        now_and_then = self._backwards & (self._backwards - 1) == 0  # looking at all that lives takes long
        if self.boundary == "" and (
            self._backwards >= _MOST_BACKWARDS_A_STEP or (now_and_then and not self._is_an_optimizer_there())
        ):
            self.boundary = "backward"
        if self.boundary == "backward":
            if self.count < _MOST_ROUNDS and not _captures():
                self._by_hand.look()
            self._end_iteration()

    def _is_an_optimizer_there(self) -> bool:
        """Or has one been made before the first backward call, or was there in an earlier run? To look for it takes long."""
        if self._optimizers and self._backwards <= _MOST_ROUNDS:
            return True
        if self._backwards == 1 and any_was_made():
            return True
        return bool(living(torch.optim.Optimizer)[0])

    def _steps_for_us(self) -> bool:
        """Is it the training thread that steps, or autograd's for it? Hooks of a GPU's backward run in a thread of the device's."""
        if self._ours():
            return True
        inside = self._depth > 0 and os.getpid() == self._pid and current_graph_task() != -1
        return inside and isinstance(threading.current_thread(), threading._DummyThread)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """A hook of torch's: what it returns are the arguments in place of `args` and `kwargs`."""
        if not self._steps_for_us():
            return None
        self._steps_open = steps_under_way()
        self.stepping = weakref.ref(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self.step_has_closure = closure is not None
        if closure is not None and calls_closure_first(optimizer):
            then = self._and_then_begins(closure, optimizer)
            return (
                ((args[0], then, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then})
            )
        self._listener.step_begins(optimizer)
        return None

    def _and_then_begins(
        self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer
    ) -> Callable[[], Any]:
        def both() -> Any:
            found = closure()
            if self._steps_for_us():
                self.step_has_closure = False
                self._listener.step_begins(optimizer)
            return found

        return both

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        inside = self._depth > 0 and self._steps_open <= 1 and os.getpid() == self._pid
        if inside:  # perhaps in a thread of autograd's
            self._stepped_inside = True
            self._inside.add(optimizer)
        if not self._steps_for_us():
            return
        self._steps_open = steps_under_way() - 1
        self._listener.step_ended(optimizer)
        if inside:
            return
        chosen = self.chosen
        is_new = optimizer not in self._stepped
        self._stepped.add(optimizer)
        if is_new:
            self._expected -= {
                each
                for each in self._expected
                if each is not optimizer and _share_parameters(each, optimizer)
            }
        if chosen is None:
            self._first = optimizer
        joins = self.rounds < (_MOST_ROUNDS if optimizer in self._expected else 2)
        self._others_steps += chosen is not optimizer and self._steps_open == 0
        if chosen is None and self._round_is_not_over:
            self._look_for_others()
            return
        left_behind = self._is_left_behind
        if chosen is None or (is_new and joins) or left_behind:
            self._joined = 0 if left_behind else len(self._stepped)
            self._steps = self.rounds + self._others_steps - 1
            self._chosen = weakref.ref(optimizer)
            self._after_backwards = self.boundary == "backward"
            self._warmed_up |= self._after_backwards and self.count > 1
            self._shares_backward = self.count > 0 and not self._backward_since
            self.boundary = "optimizer"
            chosen, self.rounds, self._others_steps, self._most_others_steps = optimizer, 0, 0, 0
        if chosen is optimizer and self._steps_open == 0:
            self.rounds += 1
            self._most_others_steps = max(self._most_others_steps, self._others_steps)
            self._others_steps = 0
            self._end_iteration()
            self._look_for_others()

    def others_are_among(self, there: Iterable[torch.optim.Optimizer]) -> None:
        """These live now, between two iterations. Optimizers that share parameters with one that steps are not waited for: one may be its wrapper,
        as Lightning and accelerate make them."""
        first, self._first = self._first, None
        if first is not None:
            self._expected |= {each for each in there if not _share_parameters(each, first)}

    def _look_for_others(self) -> None:
        if self._first is not None:
            self.others_are_among(living(torch.optim.Optimizer)[0])

    def _end_iteration(self) -> None:
        if self.count < _TIMED:
            _wait_for_gpu()
        took_ms, share = self._stretch.took_ms, self._stretch.share
        self._took_ms += took_ms
        self._waited_ms += (1 - share) * took_ms
        self.count += 1
        self._backward_since = False
        self._listener.iteration_ended(self.count, share * took_ms)
        self._stretch.begin()


def _share_parameters(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    mine, its = ({id(each) for group in one.param_groups for each in group["params"]} for one in (a, b))
    return not mine.isdisjoint(its)


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized() and not _captures():
        torch.cuda.synchronize()


def _captures() -> bool:
    """Is a CUDA graph being captured, in which nothing may be waited for?"""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
