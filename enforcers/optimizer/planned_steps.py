"""How the optimizer steps under a plan: inside backward, in pieces, with its state or its gradients in a tier; or as the script does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from memopt.enforcers.optimizer.gradients_elsewhere import GradientsElsewhere
from memopt.enforcers.optimizer.in_backward import OptimizerInBackward
from memopt.enforcers.optimizer.in_pieces import OptimizerInPieces
from memopt.enforcers.tiers.per_device import PerDevice, offload_tier
from memopt.enforcers.tiers.planned import home_tier
from memopt.enforcers.weights import python_reads
from memopt.instrument.iterations import Iterations
from memopt.instrument.script.training_thread import TrainingThread
from memopt.plan import Plan, ScriptAction

Pack = Callable[[torch.Tensor], Any]
"""The saved-tensor hook of forward."""
Unpack = Callable[[Any], torch.Tensor]
"""The saved-tensor hook of backward."""


class PlannedSteps:
    """Told of the training loop, which it hands on to what the plan asks for."""

    def __init__(self) -> None:
        self.in_backward: OptimizerInBackward | None = None
        self.in_pieces: OptimizerInPieces | None = None
        self.gradients: GradientsElsewhere | None = None
        self._cleared_late = False
        self._old_gradients: Callable[[], PerDevice] | None = None
        """Opens a tier for those of a step that is not in backward, where the script clears them only once it has run forward."""

    def install(
        self,
        plan: Plan,
        iterations: Iterations,
        swap_dir: Path,
        about_to_change: Callable[[torch.Tensor], None],
        about_to_use: Callable[[torch.optim.Optimizer, torch.Tensor], None],
    ) -> None:
        """As `plan` says; the last two are told of parameters that are stepped inside backward (see `OptimizerInBackward`)."""
        if plan.in_backward is not None:
            self.in_backward = OptimizerInBackward(iterations, about_to_change, about_to_use)
            self.in_backward.install()
            if plan.in_backward.cleared_late:
                self._old_gradients = lambda: offload_tier(swap_dir)
        if plan.in_pieces is not None:
            self._step_in_pieces(plan.in_pieces, iterations, swap_dir)

    def _step_in_pieces(self, pieces: ScriptAction, iterations: Iterations, swap_dir: Path) -> None:
        tier, self._cleared_late = home_tier(pieces, swap_dir), pieces.cleared_late
        if tier is not None and pieces.gradient_bytes:
            self.gradients = GradientsElsewhere(tier)
            self.gradients.install()
        most_away = pieces.away or None
        self.in_pieces = OptimizerInPieces(
            iterations, pieces.piece_bytes, tier, most_away, self.gradients, pieces.whole_from_bytes
        )

    def told_of(self, unpack: Unpack) -> Unpack:
        """`unpack`, of which gradients that leave during backward hear first: another node begins when a saved tensor is asked for."""
        gradients = self.gradients
        if gradients is None:
            return unpack

        def tell_and_unpack(handle: Any) -> torch.Tensor:
            rests = python_reads.rest()
            try:
                gradients.asked_for_saved()
                return unpack(handle)
            finally:
                python_reads.go_on(rests)

        return tell_and_unpack

    def told_of_saving(self, pack: Pack, thread: TrainingThread) -> Pack:
        """`pack`, of which state that is away between steps hears first: the script goes on to train."""
        pieces = self.in_pieces
        if pieces is None:
            return pack

        def tell_and_pack(tensor: torch.Tensor) -> Any:
            if thread.is_here:
                pieces.goes_on()
            return pack(tensor)

        return tell_and_pack

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Go on from an iteration boundary, after steps of `optimizers` that somebody else has watched."""
        if self.in_pieces is not None:
            self.in_pieces.begin(optimizers)
        if self.in_backward is not None:
            self.in_backward.begin(optimizers, self._old_gradients)
        for optimizer in optimizers:
            self._send_gradients(optimizer)

    def remove(self, *, ends: bool = False) -> None:
        """Leave the script to itself; in a forked child, too. `ends`: it has ended, so that what is away comes back to whoever asks for it alone."""
        for each in (self.in_backward, self.in_pieces, None if ends else self.gradients):
            if each is not None:
                each.remove()
        if ends and self.gradients is not None:
            self.gradients.rest()

    def retire(self) -> tuple[OptimizerInBackward | None, OptimizerInPieces | None]:
        """As `remove`, in a script that goes on: who is to be told of its steps for a while yet, and who has optimizer state in a tier and
        goes on to step it."""
        inside, self.in_backward = self.in_backward, None
        pieces = None
        if self.in_pieces is not None and self.in_pieces.is_away:
            pieces, self.in_pieces = self.in_pieces, None
        self.remove()
        if inside is not None:
            inside.retire()
        return inside, pieces

    def backward_begins(self, *, keep_graph: bool, create_graph: bool) -> None:
        for each in (self.in_backward, self.gradients):
            if each is not None:
                each.backward_begins(keep_graph=keep_graph, create_graph=create_graph)

    def backward_ended(self) -> None:
        for each in (self.in_backward, self.gradients):
            if each is not None:
                each.backward_ended()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        for each in (self.in_backward, self.in_pieces):
            if each is not None:
                each.step_begins(optimizer)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self.in_pieces is not None:
            self.in_pieces.step_ended(optimizer)
        self._send_gradients(optimizer)
        if self.in_backward is not None and self.in_backward.has_seen_a_step:
            self.in_backward.step_ended(optimizer)
        elif self.in_backward is not None:  # it was its own, so that its gradients are there
            self.in_backward.begin([optimizer], self._old_gradients)

    def _send_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Its step is over: gradients that the script clears late go to where the others are."""
        if self.gradients is not None:
            self.gradients.step_ended(optimizer, leave=self._cleared_late)
