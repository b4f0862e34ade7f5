"""How the optimizer is used in the recorded iteration: when each gradient is whole, when it steps, and who looks at gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor

from memopt.instrument.iterations import Iterations
from memopt.instrument.stepping.gradient_reads import GradientReads, gradient_of
from memopt.instrument.stepping.in_pieces import CLOSURE
from memopt.instrument.stepping.in_pieces import why_not as why_not_in_pieces
from memopt.instrument.stepping.premises import (
    ADD_UP,
    HOOKED,
    KEEPS_GRAPH,
    is_hooked,
    looks_at_gradients,
    optimizer_ahead,
    whole_gradient,
)
from memopt.instrument.stepping.single_parameter_step import (
    all_cleared,
    is_steady,
    parameters_of,
    several_processes,
    why_not,
)
from memopt.instrument.stepping.state_between_steps import state_tensors, why_state_stays
from memopt.profiler.recorder import Recorder
from memopt.updates import Step, Updates


class UpdateWatch:
    """Watches one optimizer while `recorder` records. What it finds once that speaks against stepping inside backward stays found."""

    def __init__(self, recorder: Recorder, iterations: Iterations, optimizer: torch.optim.Optimizer) -> None:
        self._recorder, self._iterations = recorder, iterations
        self._optimizer: torch.optim.Optimizer | None = optimizer
        self._reads = GradientReads(self)
        self._refused = why_not(optimizer) or looks_at_gradients()
        self._gradients_stay = "several processes train together" if several_processes() else ""
        self._handles: list[Any] = []
        self._old: list[int] = []
        self._rows: dict[int, tuple[int, int, int]] = {}
        """id of a parameter -> (its storage, its gradient's, first op after the gradient was whole)."""
        self._span = 0, 0
        self._others_read = 0
        self._steps: list[Step] = []
        self._open: list[tuple[int, str, bool]] = []
        """(first op, why not in pieces, with a closure) of steps that are under way, one inside the other."""

    def begin(self) -> None:
        """Right after the recorder has begun."""
        assert self._optimizer is not None
        parameters = [each for _, each in parameters_of(self._optimizer)]
        met = self._recorder.met
        self._old = [met.row_of(found) for each in parameters if (found := gradient_of(each)) is not None]
        for each in parameters:
            if is_hooked(each):
                self._refuse(HOOKED, of_both=True)
            if each.requires_grad and each.is_leaf:
                self._handles.append(each.register_post_accumulate_grad_hook(self._ready))
        self._reads.install()

    def end(self) -> Updates:
        """Watch no more; what was found."""
        self._reads.remove()
        for handle in self._handles:
            handle.remove()
        optimizer, self._optimizer = self._optimizer, None  # not to be kept alive by what watched it
        recorder = self._recorder
        if not self._rows or self._span[0] >= self._span[1]:
            self._refuse("no gradient became whole before a step", of_both=True)
        if recorder.backward_calls != 1:
            self._refuse(f"there are {recorder.backward_calls} backward calls to a step", of_both=True)
        rows = list(self._rows.values())
        if min([*self._old, *(number for row in rows for number in row)], default=0) < 0:
            self._refuse("a parameter or gradient lies on another device", of_both=True)
        known = Updates(
            optimizer=type(optimizer).__name__,
            refused=self._refused,
            gradients_stay=self._gradients_stay,
            others_read=self._others_read,
            in_pieces=next((step.in_pieces for step in self._steps if step.in_pieces), "")
            if self._steps
            else None,
            steps=self._steps,
        )
        if self._refused and self._gradients_stay:
            return known
        return msgspec.structs.replace(
            known,
            begin_op=self._span[0],
            end_op=self._span[1],
            parameter=[parameter for parameter, _, _ in rows],
            gradient=[gradient for _, gradient, _ in rows],
            ready_before=[op for _, _, op in rows],
            old_gradients=sorted(set(self._old)),
        )

    def _refuse(self, why: str, *, of_both: bool = False) -> None:
        """`of_both`: nor can gradients leave for a tier."""
        self._refused = self._refused or why
        if of_both:
            self._gradients_stay = self._gradients_stay or why

    # --- the training loop

    def backward_begins(self, *, keep_graph: bool, create_graph: bool) -> None:
        if keep_graph or create_graph:
            self._refuse(KEEPS_GRAPH, of_both=True)
        assert self._optimizer is not None
        if not all_cleared(self._optimizer):
            self._refuse(ADD_UP, of_both=True)
        ahead, why = optimizer_ahead()
        if ahead is not self._optimizer:
            self._refuse(why or "another optimizer is stepped after backward")

    def _ready(self, parameter: Tensor) -> None:
        gradient, rows = whole_gradient(parameter), self._recorder.met.row_of
        if self._iterations.nested or id(parameter) in self._rows:
            self._refuse("backward is called inside backward", of_both=True)
        elif gradient is None:
            self._refuse("a gradient is sparse", of_both=True)
        elif self._is_steady(parameter):
            self._rows[id(parameter)] = rows(parameter), rows(gradient), len(self._recorder.ops)

    def _is_steady(self, parameter: Tensor) -> bool:
        optimizer = self._optimizer
        assert optimizer is not None
        return any(
            is_steady(optimizer, group, parameter)
            for group, each in parameters_of(optimizer)
            if each is parameter
        )

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizer or self._span != (0, 0):
            self._refuse("several optimizers train, or one steps twice", of_both=True)
        self._span = len(self._recorder.ops), 0
        with_closure = self._iterations.step_has_closure
        self._open.append(
            (self._span[0], why_not_in_pieces(optimizer, with_closure=with_closure), with_closure)
        )

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._span = self._span[0], len(self._recorder.ops)
        if not self._open:
            return
        begin, in_pieces, with_closure = self._open.pop()
        stays = CLOSURE if with_closure else why_state_stays(optimizer)
        rows = self._recorder.met.row_of
        state = [] if stays else [rows(each) for each in state_tensors(optimizer)]
        self._steps.append(
            Step(
                begin_op=begin,
                end_op=self._span[1],
                in_pieces=in_pieces,
                state_stays=stays,
                state=[row for row in state if row >= 0],
            )
        )

    # --- who looks at gradients (Reader)

    def read(self, tensor: Tensor, where: str) -> None:
        optimizer = self._optimizer
        stepped = optimizer is not None and any(each is tensor for _, each in parameters_of(optimizer))
        self._others_read += not stepped
        self._refuse(f"the script looks at gradients ({where})")

    def set(self, tensor: Tensor) -> None:
        return None

    def zeroed(self, tensors: Iterable[Tensor], *, to_none: bool) -> None:
        return None


def watch_updates(recorder: Recorder, iterations: Iterations) -> UpdateWatch | None:
    """A watch that has begun, where an optimizer is known by now."""
    optimizer = iterations.chosen
    if optimizer is None:
        return None
    watch = UpdateWatch(recorder, iterations, optimizer)
    watch.begin()
    return watch
