"""Optimizer in backward: each parameter is stepped as soon as its gradient is whole, and the gradient let go at once.

LOMO (Lv et al. 2023) and PyTorch's own tutorial do so by hand; here the script stays as it is, and its `optimizer.step()` does
what is left to do. A backward call is enforced only if, before it runs, it is sure that the plain run would do the same: its
caller steps the optimizer right after it and does nothing in between (`step_after_backward`), no parameter has a gradient yet, and the
optimizer is one that gives the same bits one parameter at a time (`single_parameter_step`). Any other backward call is left alone.
The script's own code must clear gradients on every path to the next backward call (`cleared`), and nowhere speak of gradients
otherwise (`source_mentions_gradients`). Where something wants one all the same, the run ends with an error, since the plain one would go on
with a gradient that is gone: a result is never changed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from memopt.enforcers.optimizer.gradients_elsewhere import GradientsElsewhere
from memopt.enforcers.tiers.swap import SwapTier
from memopt.errors import NotPossibleHere
from memopt.instrument.iterations import Iterations
from memopt.instrument.stepping.gradient_reads import GradientReads, let_go
from memopt.instrument.stepping.premises import KEEPS_GRAPH, not_fresh, optimizer_ahead, whole_gradient
from memopt.instrument.stepping.single_parameter_step import (
    Group,
    is_steady,
    parameters_of,
    step_one,
    why_not,
)
from memopt.instrument.torch_internals import storage_use_count


class OptimizerInBackward:
    """Told of the training loop, as a `Listener`; steps parameters while a backward call runs that it may enforce."""

    def __init__(
        self,
        iterations: Iterations,
        about_to_change: Callable[[Tensor], None],
        about_to_use: Callable[[torch.optim.Optimizer, Tensor], None],
    ) -> None:
        """`about_to_change` is told of each parameter before its step, `about_to_use` that its gradient is whole."""
        self._iterations = iterations
        self._about_to_change = about_to_change
        self._about_to_use = about_to_use
        self._reads = GradientReads(self)
        self._old: GradientsElsewhere | None = None
        """Gradients of a step outside backward, which the script clears only once it has run forward."""
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have made a step of their own."""
        self._hooked: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._armed: torch.optim.Optimizer | None = None
        """What the running backward call may step."""
        self._groups: dict[int, Group] = {}
        self._used: dict[int, weakref.ref[Tensor]] = {}
        """Parameters whose gradients are gone, though the plain run would still have them."""
        self._holders: dict[int, int] = {}
        """Most tensors that shared the storage of a parameter when no graph was there."""
        self._step_due = False
        """Parameters were stepped inside backward, and the script's own step is still to come."""
        self.most_used = 0
        """Most gradients that one backward call has used."""
        self.declined: Counter[str] = Counter()
        """Why backward calls were left alone."""
        self.ended_the_run = False

    @property
    def why_not_all(self) -> str:
        """Why it was not done as often as planned."""
        return "; ".join(self.declined) or "no step came right after a backward call"

    def install(self) -> None:
        self._reads.install()

    def begin(
        self, optimizers: Iterable[torch.optim.Optimizer], tier: Callable[[], SwapTier[Any]] | None = None
    ) -> None:
        """Go on after steps of `optimizers` outside backward. With a `tier` their gradients are there until the next backward call, or
        whoever asks sooner."""
        stepped = [*optimizers]
        for optimizer in stepped:
            self.step_ended(optimizer)
        if tier is None:
            return
        self._reads.remove()
        self._old = GradientsElsewhere(tier(), with_small=True)  # once only
        self._old.install()
        for optimizer in stepped:
            self._old.step_ended(optimizer, leave=True)

    @property
    def has_seen_a_step(self) -> bool:
        return bool(self._stepped)

    def _bring_old_ones(self) -> None:
        """Those that the script has not cleared meanwhile; from here on the gradients to watch are ours."""
        if self._old is not None:
            self._old.remove()
            self._old = None
            self._reads.install()

    def remove(self) -> None:
        self.retire()
        self._reads.remove()

    def retire(self) -> None:
        """From here on, an iteration boundary, the script steps by itself. Until it has cleared what the plain run would still have, who looks
        at that, or steps with it, is told."""
        self._bring_old_ones()
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        self.backward_ended()

    @property
    def misses_gradients(self) -> bool:
        """Are gradients gone that the plain run would still have?"""
        return any(known() is not None for known in self._used.values())

    # --- before, during and after backward

    def backward_begins(self, *, keep_graph: bool, create_graph: bool) -> None:
        """Find out whether this call may step an optimizer."""
        self._bring_old_ones()
        if self._step_due:
            self._break("the script calls backward again without the step that was to come")
        optimizer, why = (None, KEEPS_GRAPH) if keep_graph or create_graph else optimizer_ahead()
        why = why if optimizer is None else self._why_not_now(optimizer)
        if optimizer is None or why:
            self.declined[why] += 1
            return
        self._armed = optimizer
        self._groups = {
            id(each): group
            for group, each in parameters_of(optimizer)
            if each.requires_grad and is_steady(optimizer, group, each)
        }
        self._hook(optimizer)

    def _why_not_now(self, optimizer: torch.optim.Optimizer) -> str:
        if optimizer not in self._stepped:
            return "the optimizer's first step is its own"
        if len(self._stepped) > 1:
            return "several optimizers train"
        return not_fresh(optimizer, self._our_hook) or why_not(optimizer)

    def _our_hook(self, parameter: Tensor) -> set[int]:
        known = self._hooked.get(id(parameter))
        return {known[1].id} if known is not None and known[0]() is parameter else set()

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        for _, each in parameters_of(optimizer):
            if id(each) in self._groups and not self._our_hook(each):
                handle = each.register_post_accumulate_grad_hook(self._ready)
                self._hooked[id(each)] = weakref.ref(each), handle

    def _ready(self, parameter: Tensor) -> None:
        """The gradient of `parameter` is whole: use it and let it go."""
        optimizer, group = self._armed, self._groups.get(id(parameter))
        if self._is_used(parameter):
            if group is not None:
                self._break("the script adds to gradients that it has not cleared")
            let_go(
                parameter
            )  # half of a sum, which the plain run would have: who looks, or steps, is told then
            return
        if optimizer is None or group is None:
            return
        if whole_gradient(parameter) is None or self._iterations.nested:
            return
        if _holders(parameter) > self._holders.get(id(parameter), 0):
            self.declined["backward may still need a detached view of a parameter"] += 1
            return
        self._about_to_use(optimizer, parameter)
        self._about_to_change(parameter)
        self._step_due = True
        self._used[id(parameter)] = weakref.ref(parameter)
        step_one(optimizer, group, parameter)
        let_go(parameter)

    def backward_ended(self) -> None:
        self._armed = None
        self._groups = {}
        self.most_used = max(self.most_used, len(self._used))

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._step_due and any(self._is_used(each) for _, each in parameters_of(optimizer)):
            self._break("the script makes a second step with the same gradients")

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        for _, each in parameters_of(optimizer):
            known = self._holders.get(id(each))
            self._holders[id(each)] = _holders(each) if known is None else min(known, _holders(each))
        self._stepped.add(optimizer)
        self._step_due = False

    # --- who looks at gradients (Reader)

    def read(self, tensor: Tensor, where: str) -> None:
        if self._is_used(tensor):
            self._break(f"the script looks at a gradient after it was used ({where})")

    def set(self, tensor: Tensor) -> None:
        self._used.pop(id(tensor), None)

    def zeroed(self, tensors: Iterable[Tensor], *, to_none: bool) -> None:
        """`zero_grad(set_to_none=False)` leaves zeros behind where there was a gradient."""
        for tensor in tensors:
            if self._is_used(tensor) and not to_none:
                tensor.grad = torch.zeros_like(tensor)
            self._used.pop(id(tensor), None)

    def _is_used(self, tensor: Tensor) -> bool:
        known = self._used.get(id(tensor))
        return known is not None and known() is tensor

    def _break(self, what: str) -> NoReturn:
        self.ended_the_run = True
        raise NotPossibleHere(
            f"this run cannot go on under its plan: {what}",
            why="the plan steps the optimizer inside backward, where each gradient is used and let go; the plain run would still have it",
            try_="memopt run once more, which plans without that then, or memopt advise PROFILE --deny optimizer, with the same budget",
        )


def _holders(tensor: Tensor) -> int:
    """How many tensors share its storage. Nodes that saved the parameter itself do not count: its gradient waits for them."""
    count: int = storage_use_count(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
    return count
