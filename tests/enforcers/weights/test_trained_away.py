"""Weights that are trained leave between forward and backward: bits, bytes, the step, and whoever looks at them meanwhile."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.enforcers.weights.watched import WatchedWeights
from memopt.estimators.simulator.trace_view import TraceView
from memopt.plan import GRADIENTS_IN_PLACE, Plan, ScriptAction
from memopt.trace import Trace
from tests.enforcers.optimizer.test_gradients_elsewhere import plan as pieces_plan
from tests.enforcers.weights.test_frozen_away import (  # fmt: skip
    LAYERS,
    LOOKS,
    WEIGHT_BYTES,
    WIDTH,
    Look,
    close,
    evaluated,
    nothing,
    weights_of,
)
from tests.support.enforced import SWAP, enforced, everything, plan_of, recorded, seeded, state_digests
from tests.support.loops import stepped_in_hooks

Make = Callable[[Any], torch.optim.Optimizer]


class Layer(nn.Module):
    """Its weight is where the frozen layers of `test_frozen_away` have theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(
    steps: int,
    *,
    make: Make = sgd,
    in_forward: Look = nothing,
    in_between: Look = nothing,
    clip: bool = False,
) -> list[str]:
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    optimizer = make(model.parameters())
    found = []
    for _ in range(steps):
        out = model(torch.randn(512, WIDTH))
        found.append(in_forward(model))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        found.append(in_between(model))
        found += [digest(loss), *state_digests(model)]
    return found


def all_away(problem: Problem) -> Decisions:
    return {s: SWAP for s, c in problem.candidates.items() if c.saved.is_weight}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(trained, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def plan(trace: Trace) -> Plan:
    return plan_of(trace, all_away)


def test_they_are_away_at_the_peak_and_stepped_as_ever(trace: Trace, plan: Plan, tmp_path: Path) -> None:
    assert weights_of(plan) >= LAYERS - 1, "the last one may be asked for at once"
    assert plan.predicted_peak_bytes < plan.unplanned_peak_bytes - WEIGHT_BYTES
    computed, outcome = enforced(trained, plan, tmp_path, 4, measure=True)
    assert computed == seeded(trained, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert close(outcome), outcome
    assert not list(tmp_path.glob("*swap*"))


def held(steps: int) -> list[str]:
    """As an average of the weights is made: a list of `.data` of the first three. The fourth is numpy's."""
    kept: list[object] = []

    def keep(model: nn.Module) -> str:
        weights = [layer.base.weight for layer in model.children()]
        kept[:] = [*(each.data for each in weights[:3]), weights[3].detach().numpy()]
        return ""

    return trained(steps, in_between=keep)


def test_what_something_beside_its_module_holds_is_not_planned_to_leave(tmp_path: Path) -> None:
    plan = plan_of(recorded(held, tmp_path), all_away)
    assert 1 <= weights_of(plan) <= LAYERS - 4
    computed, outcome = enforced(held, plan, tmp_path, 4, measure=True)
    assert computed == seeded(held, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert close(outcome), outcome


class Capsules(nn.Module):
    """Its weight is permuted and copied inside `einsum`, which holds it to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 10, 8, 16) / 8)
        self.out = nn.Linear(160, 2048)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("ijnm,bin->bijm", self.weight, x.view(-1, 256, 8))
        out: Tensor = self.out(torch.tanh(made).mean(1).flatten(1))
        return out


def capsules(steps: int) -> list[str]:
    model = Capsules()
    optimizer = sgd(model.parameters())
    found = []
    for _ in range(steps):
        loss = model(torch.randn(64, 2048)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


def test_what_an_op_made_of_others_holds_leaves_once_that_is_over(tmp_path: Path) -> None:
    """A capsule layer's weight stayed in each iteration, and the run was recorded again and again."""
    plan = plan_of(recorded(capsules, tmp_path), all_away)
    labels = [each.label for each in plan.actions]
    assert any(label.startswith("Capsules.weight") for label in labels), labels
    computed, outcome = enforced(capsules, plan, tmp_path, 4, measure=True)
    assert computed == seeded(capsules, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert close(outcome), outcome


def test_with_all_else_that_a_plan_may_do(trace: Trace, tmp_path: Path) -> None:
    """Saved tensors are made again, the state and the gradients are in the tier, backward writes over its gradients."""
    loop = functools.partial(trained, make=lambda p: torch.optim.AdamW(p, lr=1e-3), clip=True)
    mixed = plan_of(
        recorded(loop, tmp_path), lambda problem: everything("recompute")(problem) | all_away(problem)
    )
    over = ScriptAction(kind="backward", what=GRADIENTS_IN_PLACE, why="", saved_bytes=0, least_bytes=1, ops=1)
    mixed = msgspec.structs.replace(
        mixed, script_actions=[*pieces_plan(parameters=LAYERS).script_actions, over]
    )
    computed, outcome = enforced(loop, mixed, tmp_path, 5)
    assert computed == seeded(loop, 5)
    assert outcome.actions.skipped == 0, outcome.notes


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whoever_looks_while_they_are_away_finds_them(plan: Plan, tmp_path: Path, look: Look) -> None:
    loop = functools.partial(trained, in_forward=look)
    computed, _ = enforced(loop, plan, tmp_path, 3)
    assert computed == seeded(loop, 3)


def hooked(steps: int, *, told: Callable[[], object] = lambda: None) -> list[str]:
    """Hooks on tensors, nodes and parameters read weights of other layers while backward runs, past every module."""
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    weights = [layer.base.weight for layer in model]
    optimizer = sgd(model.parameters())
    found: list[str] = []

    def add(gradient: Tensor, weight: Tensor) -> Tensor:
        told()
        found.append(digest(weight.detach()))
        return gradient + weight.mean() * gradient.norm()

    def add_in_place(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(weights[0].sum() * 1e-3)

    for _ in range(steps):
        x = torch.randn(512, WIDTH)
        for each, weight in zip(model, weights, strict=True):
            x = each(x)
            x.register_hook(lambda gradient, weight=weight: add(gradient, weight))
            x.grad_fn.register_prehook(lambda gradients, weight=weight: (add(gradients[0], weight),))
        after = weights[2].register_post_accumulate_grad_hook(add_in_place)
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after.remove()
        found += [digest(loss), *state_digests(model)]
    return found


def test_hooks_that_read_weights_in_backward_find_them_and_nothing_else_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(recorded(hooked, tmp_path), all_away)
    watched = []
    before = WatchedWeights.before

    def counted(self: WatchedWeights, func: Any, *given: Any) -> None:
        watched.append(str(func))
        before(self, func, *given)

    monkeypatch.setattr(WatchedWeights, "before", counted)
    watching = []

    def told() -> None:
        watching.append(any("python_reads" in type(m).__module__ for m in _get_current_function_mode_stack()))

    computed, outcome = enforced(functools.partial(hooked, told=told), plan, tmp_path, 4)
    assert computed == seeded(hooked, 4)
    assert outcome.actions.done >= LAYERS - 1, outcome.notes
    assert any(watching)
    assert "aten.mean.default" in watched  # the hook's
    assert "aten.tanh_backward.default" not in watched  # autograd's
    assert not _get_current_function_mode_stack()


def steps_inside(steps: int) -> list[str]:
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    return stepped_in_hooks(
        model, lambda p: torch.optim.SGD(p, lr=0.1), lambda: torch.randn(512, WIDTH), steps
    )


def test_a_step_inside_backward_has_its_own_parameters_back_and_no_others(tmp_path: Path) -> None:
    """The first step of a backward pass had all of them back, and the budget was passed by as much."""
    plan = plan_of(recorded(steps_inside, tmp_path), all_away)
    assert weights_of(plan) >= LAYERS - 1
    assert plan.predicted_peak_bytes < plan.unplanned_peak_bytes - WEIGHT_BYTES
    computed, outcome = enforced(steps_inside, plan, tmp_path, 4, measure=True)
    assert computed == seeded(steps_inside, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert close(outcome), outcome


def test_an_evaluation_without_gradients_sends_nothing_away(plan: Plan, tmp_path: Path) -> None:
    loop = functools.partial(trained, in_between=evaluated)
    computed, outcome = enforced(loop, plan, tmp_path, 4, measure=True)
    assert computed == seeded(loop, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert close(outcome), outcome


def test_a_thread_that_reads_weights_past_their_modules_has_them(
    plan: Plan, tmp_path: Path, sessions: list[WatchedWeights]
) -> None:
    """It is started while they are away, and reads them to the end by plain ops, which no mode sees."""
    ended, found = threading.Event(), [0.0]
    away: list[int] = []

    def averages(model: nn.Module) -> None:
        while not ended.is_set():
            found.append(sum(float(each.detach().abs().sum()) for each in model.parameters()))

    def in_forward(model: nn.Module) -> str:
        away.append(len(sessions[0].away))
        if len(found) == 1:
            threading.Thread(target=averages, args=(model,)).start()
        seen = len(found)
        while len(found) < seen + 3:
            time.sleep(0)
        return ""

    try:
        computed, _ = enforced(functools.partial(trained, in_forward=in_forward), plan, tmp_path, 3)
    finally:
        ended.set()
    assert computed == seeded(trained, 3)
    assert away == [weights_of(plan), 0, 0]


def test_a_script_with_such_a_thread_has_no_plan_that_sends_weights_away(trace: Trace) -> None:
    beside = msgspec.structs.replace(trace, facts=trace.facts | {"other_threads": 1})
    assert trace.facts["other_threads"] == 0
    assert not plan_of(beside, all_away).actions


def without_modules(steps: int, *, optimizer: bool = True) -> list[str]:
    weights = [torch.randn(WIDTH, WIDTH).mul_(0.02).requires_grad_() for _ in range(LAYERS)]
    sgd = torch.optim.SGD(weights, lr=0.1) if optimizer else None
    found = []
    for _ in range(steps):
        out = torch.randn(512, WIDTH)
        for each in weights:
            out = torch.tanh(out @ each)
        loss = out.square().mean()
        loss.backward()
        for each in () if sgd is not None else weights:
            each.data -= 0.1 * each.grad
            each.grad = None
        if sgd is not None:
            sgd.step()
            sgd.zero_grad()
        found.append(digest(loss))
    return found


@pytest.mark.parametrize("optimizer", [True, False])
def test_weights_that_no_module_has_stay(optimizer: bool, tmp_path: Path) -> None:
    """The run did not find them again, and came to more than any plan had foretold."""
    trace = recorded(functools.partial(without_modules, optimizer=optimizer), tmp_path)
    assert trace.storages.size_bytes.count(WEIGHT_BYTES) > LAYERS
    assert not any(each.is_weight for each in TraceView(trace).saved.values())
