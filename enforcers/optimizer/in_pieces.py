"""The optimizer's step in pieces: its own step, on slices of the parameters one after the other; its state in a tier between steps.

Temporaries (Adam's `sqrt` and `div`) are of one piece then, and with a tier the state is paged as in ZeRO-Infinity (Rajbhandari et al.
2021, for several GPUs and with a kernel of its own; here it is the optimizer's own kernel on the same device, and the same bits: see
`paged.py`). The whole update runs when the script calls `step`, after clipping and scaling; the script's own step then finds no gradients,
and gets them back when it has ended. The state of an optimizer that cannot be stepped so may be in the tier, too (`state_away.py`).
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memopt.enforcers import capturing
from memopt.enforcers.optimizer.first_step import gradients_to_come, temporaries_of
from memopt.enforcers.optimizer.gradients_elsewhere import GradientsElsewhere
from memopt.enforcers.optimizer.paged import PagedOptimizer
from memopt.enforcers.optimizer.state_away import StateAway
from memopt.enforcers.optimizer.state_elsewhere import StateElsewhere
from memopt.enforcers.optimizer.state_looks import trained
from memopt.enforcers.tiers.swap import SwapTier
from memopt.enforcers.weights.emptied import Room
from memopt.instrument.iterations import Iterations
from memopt.instrument.script.signals import held
from memopt.instrument.stepping.gradient_reads import give_back, gradient_of, kept_gradient, let_go
from memopt.instrument.stepping.in_pieces import lies_like, same_bits_in_pieces, why_not
from memopt.instrument.stepping.single_parameter_step import parameters_of
from memopt.instrument.torch_internals import DisableTorchDispatch


class OptimizerInPieces:
    """Told of the training loop; steps what it may in pieces."""

    def __init__(
        self,
        iterations: Iterations,
        piece_bytes: int,
        tier: SwapTier[Any] | None,
        most_away: int | None = None,
        gradients: GradientsElsewhere | None = None,
        whole_from: int = 0,
    ) -> None:
        """`tier`: where state goes between steps; none: it stays. `most_away`: of so many parameters, the largest of all optimizers'; none: of all.
        `gradients`: where those are that are in a tier, too. `whole_from`: of optimizers that cannot step in pieces, state of so many
        bytes and more goes there, too; 0: none. `piece_bytes` of 0: they are all the plan is about."""
        self._elsewhere = gradients
        self._whole = StateAway(iterations, tier, whole_from) if tier is not None and whole_from else None
        self.piece_bytes = piece_bytes
        self._iterations, self._tier, self._most_away = iterations, tier, most_away
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, PagedOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._trusted: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._hidden: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Tensor, Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        """Gradients that the script's own step does not see. Several steps may be under way, each in a thread of autograd's."""
        self._used: Counter[int] = Counter()
        """id of an optimizer, which may be gone -> most parameters that one of its steps has stepped in pieces."""
        self._stepping_whole: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.declined: Counter[str] = Counter()
        self._room: Room | None = None
        self.keeps_bytes = 0
        """So much of what steps in pieces may stay on the device between steps."""
        self._pid = os.getpid()
        self._went_on = -1
        """Iterations that had ended when `goes_on` was called for the first time since."""

    def come_into(self, room: Room) -> None:
        """State that comes back asks `room` for memory from here on, and gradients that do tell it; of pieces in a step there are never more
        than three."""
        self._room = room
        if self._elsewhere is not None:
            self._elsewhere.room = room
        if self._whole is not None:
            self._whole.room = room

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Do the step, and leave nothing to do for the script's own. A Ctrl-C comes when the update is whole."""
        guard = DisableTorchDispatch()
        try:
            with held(), torch.no_grad():
                self._step(optimizer)
        except BaseException:  # no word comes of the end of a step that raised
            self.step_ended(optimizer)
            raise
        finally:
            del guard

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Send away the state that `optimizers` have made in the steps before this one was told of any; between two steps."""
        guard = DisableTorchDispatch()
        try:
            with held(), torch.no_grad():
                for optimizer in optimizers:
                    if self._tier is None:
                        continue
                    self._find_state(optimizer)
                    if not self._reason(optimizer, {}):
                        self._stepped_of(optimizer).leave(optimizer)
                    elif self._whole is not None:
                        self._leave_whole(optimizer)
        finally:
            del guard

    def goes_on(self) -> None:
        """A tensor is saved for backward. At the first of an iteration state leaves again that a checkpoint, say, has looked at since the step."""
        if self._went_on == self._iterations.count:
            return
        self._went_on = self._iterations.count
        if os.getpid() != self._pid:
            return  # what it was is back since before the fork, and the tier is the parent's
        if not (self._iterations.in_step or self._iterations.in_backward or capturing.on_this_stream()):
            self.begin([each for each in self._iterations.stepped if self._is_back(each)])
            self._leaves_again()

    def _leaves_again(self) -> None:
        if self._room is not None:
            self._room.leaves_again()

    def _is_back(self, optimizer: torch.optim.Optimizer) -> bool:
        stepped = self._stepped.get(optimizer)
        return (stepped is not None and stepped.is_back) or (
            self._whole is not None and self._whole.is_back(optimizer)
        )

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = {id(each): found for group in optimizer.param_groups for each in group["params"] if (found := kept_gradient(each)) is not None}  # fmt: skip
        self._find_state(optimizer)
        reason = self._reason(optimizer, gradients)
        if reason:
            if self._whole is None:
                self.declined[reason] += 1
            else:
                self._whole.step_begins(optimizer)
                self._stepping_whole.add(optimizer)
            return
        stepped = self._stepped_of(optimizer)
        stepped.keeps_bytes = max(0, self.keeps_bytes - self.kept_bytes + stepped.kept_bytes)
        stepped.step(optimizer, gradients, self._elsewhere)
        used = len(gradients)
        if self._elsewhere is not None:
            used += sum(self._elsewhere.holds(each) for _, each in parameters_of(optimizer))
            self._elsewhere.step_begins()
        self._used[id(optimizer)] = max(self._used[id(optimizer)], used)
        if not gradients:
            return
        self._hidden[optimizer] = [
            (each, gradients[id(each)]) for _, each in parameters_of(optimizer) if id(each) in gradients
        ]
        for each, _ in self._hidden[optimizer]:
            let_go(each)

    def _find_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Whatever is not in pieces of ours is there whole: state that has left as a whole, or in pieces as they were laid out before, and that of
        another optimizer, where the script has two share it."""
        stepped = self._stepped.get(optimizer)
        if stepped is not None and not stepped.fits(optimizer):
            stepped.bring_back()
            del self._stepped[optimizer]
            self._trusted.pop(optimizer, None)
            stepped = None
        state = vars(optimizer).get("state")
        if isinstance(state, StateElsewhere) and not (stepped is not None and stepped.stands_for(state)):
            state.bring_back()

    @property
    def most_used(self) -> int:
        """Parameters that have been stepped in pieces, of all optimizers, and tensors of other state that have been away."""
        return self._used.total() + (self._whole.most_away if self._whole is not None else 0)

    @property
    def why_not_all(self) -> str:
        """Why it was not done as often as planned."""
        return "; ".join(self.declined) or "no step was made"

    def _reason(self, optimizer: torch.optim.Optimizer, gradients: dict[int, Tensor]) -> str:
        """Why it must not step in pieces; empty when nothing speaks against it."""
        if not self.piece_bytes:
            return "no step is to be taken in pieces"
        reason = (
            why_not(optimizer, with_closure=self._iterations.step_has_closure)
            or _odd(optimizer, gradients)
            or _odd_state(optimizer)
        )
        if not reason and not self._is_trusted(optimizer):
            reason = f"{type(optimizer).__name__} gives other bits in pieces on this device, or no step could be tried"
        return reason

    def _stepped_of(self, optimizer: torch.optim.Optimizer) -> PagedOptimizer:
        if optimizer not in self._stepped:
            self._stepped[optimizer] = PagedOptimizer(
                optimizer, self.piece_bytes, self._tier, self._to_leave(optimizer), self._room
            )
        return self._stepped[optimizer]

    def _to_leave(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """ids of its parameters whose state leaves: all, or those of the largest of all optimizers that have stepped, and step in pieces."""
        if self._most_away is None:
            return {id(each) for each in trained(optimizer)}
        optimizers = sorted({optimizer, *self._iterations.stepped}, key=id)
        in_pieces = [one for one in optimizers if one is optimizer or not self._reason(one, {})]
        of_all = {id(each): each for one in in_pieces for each in trained(one)}
        largest = sorted(of_all.values(), key=lambda each: -each.nbytes)[: self._most_away]
        return {id(each) for each in largest}

    def _is_trusted(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._trusted:
            try:
                self._trusted[optimizer] = same_bits_in_pieces(optimizer)
            except Exception:  # whatever it is, the script's own step meets it too, or has none of it
                self._trusted[optimizer] = False
        return self._trusted[optimizer]

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """The script's own step is over, or was never begun: gradients are where they were."""
        for parameter, gradient in self._hidden.pop(optimizer, []):
            if gradient_of(parameter) is None:
                give_back(parameter, gradient)
        if optimizer in self._stepping_whole:
            self._stepping_whole.discard(optimizer)
            self._leave_whole(optimizer)
        self._leaves_again()

    def _leave_whole(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._whole is not None
        reason = self._whole.step_ended(optimizer)
        if reason:
            self.declined[reason] += 1

    def failures(self) -> list[str]:
        """What went wrong with the tier; what could not be moved has stayed."""
        failure = self._tier.failure if self._tier is not None else None
        return (
            [f"{failure.what}; optimizer state that could not be moved has stayed"]
            if failure is not None
            else []
        )

    def frees_nothing(self) -> list[str]:
        """Why paging has freed nothing, if that is so."""
        why = self._tier.frees_nothing if self._tier is not None else ""
        return [why] if why else []

    def bring_back(self) -> None:
        """All state is on the device, until the next step."""
        for stepped in list(self._stepped.values()):
            stepped.bring_back()
        if self._whole is not None:
            self._whole.bring_back()

    def keep_none(self) -> None:
        """State that has stayed on the device leaves, and so will all of it after the steps to come."""
        if self._tier is None or not (self.kept_bytes or self._most_away is not None):
            return
        self.keeps_bytes, self._most_away = 0, None
        guard = DisableTorchDispatch()
        try:
            with held(), torch.no_grad():
                for optimizer, stepped in list(self._stepped.items()):
                    stepped.leave_all(optimizer)
        finally:
            del guard

    @property
    def kept_bytes(self) -> int:
        """State of what steps in pieces that has stayed there."""
        return sum(each.kept_bytes for each in self._stepped.values())

    @property
    def away_bytes(self) -> int:
        """State of what steps in pieces that is in the tier now."""
        return sum(each.away_bytes for each in self._stepped.values())

    @property
    def is_away(self) -> bool:
        """Is any state in the tier now?"""
        return self.away_bytes + self._whole_bytes > 0

    @property
    def _whole_bytes(self) -> int:
        return self._whole.away_bytes if self._whole is not None else 0

    def plain_step_bytes(self) -> int:
        """What there will be on the device, beside what is there now, when the optimizers step as the script does."""
        in_the_step = sum(gradients_to_come(each) + temporaries_of(each) for each in self._stepped)
        return self.away_bytes + self._whole_bytes + in_the_step

    def remove(self) -> None:
        """Page no more. State that is away comes back when somebody asks for it: the tier stays open until the process ends."""
        if self._whole is not None:
            self._whole.remove()
        for optimizer in list(self._hidden):
            self.step_ended(optimizer)


def _odd(optimizer: torch.optim.Optimizer, gradients: dict[int, Tensor]) -> str:
    if capturing.on_this_stream():
        return "a CUDA graph was being captured"
    for _, parameter in parameters_of(optimizer):
        each = gradients.get(id(parameter))
        if each is None:
            continue
        if not parameter.requires_grad or not parameter.numel():
            return "a parameter that is frozen, or empty, has a gradient"
        if each.layout is not torch.strided or type(each) is not Tensor:
            return "a gradient is sparse, or a tensor of another kind"
        if (each.dtype, each.device, each.shape) != (parameter.dtype, parameter.device, parameter.shape):
            return "a gradient is of another data type, device or shape than its parameter"
        if each.requires_grad:
            return "a gradient has a graph of its own"
    return ""


def _odd_state(optimizer: torch.optim.Optimizer) -> str:
    for parameter in dict.keys(optimizer.state):
        for value in dict.values(dict.__getitem__(optimizer.state, parameter)):
            if isinstance(value, Tensor) and value.dim() and not lies_like(value, parameter):
                return "the optimizer's state does not lie in memory as the parameters do"
    return ""
