"""Backward calls that make a graph of their own (`create_graph`): what they save leaves as well, and what they ask for leaves again."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_EACH
from memopt.estimators.simulator.timeline import Simulator
from tests.support.enforced import (
    all_again,
    any_mixture,
    enforced,
    everything,
    plan_of,
    problem_of,
    recorded,
    seeded,
    state_digests,
)


def physics_informed(steps: int) -> list[str]:
    """A loss of second derivatives."""
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    found = []
    for _ in range(steps):
        x = torch.rand(2000, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        loss = (slope[:, 1] - bend[:, 0] + model(torch.rand(2000, 2))[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


def gradient_penalty(steps: int) -> list[str]:
    """A critic of a Wasserstein GAN."""
    critic = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.InstanceNorm2d(32, affine=True),
        nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Conv2d(32, 1, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(critic.parameters(), 1e-4)
    found = []
    for _ in range(steps):
        real, fake, mixed = torch.rand(8, 3, 16, 16), torch.rand(8, 3, 16, 16), torch.rand(8, 1, 1, 1)
        between = (mixed * real + (1 - mixed) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(2, 1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(critic)]
    return found


def meta_learning(steps: int) -> list[str]:
    """MAML: the loss of a model after steps of gradient descent, differentiated through them."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 49, 5),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    found = []
    for _ in range(steps):
        total = torch.zeros(())
        for _ in range(2):
            images, kinds = torch.rand(10, 1, 14, 14), torch.randint(0, 5, (10,))
            weights = dict(model.named_parameters())
            for _ in range(2):
                inner = F.cross_entropy(functional_call(model, weights, images), kinds)
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                weights = {
                    name: p - 0.1 * slope for (name, p), slope in zip(weights.items(), slopes, strict=True)
                }
            total = total + F.cross_entropy(functional_call(model, weights, images), kinds)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        found += [digest(total), *state_digests(model)]
    return found


def meta_learning_in_batches(steps: int) -> list[str]:
    """The same of a model with batch norms: the backward of one is given running statistics, which the next step moves on, and does not read
    them. The gradients of the last step of all outlive the graph that they have been made with."""
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = []
    for _ in range(steps):
        total = torch.zeros(())
        for _ in range(2):
            rows, kinds = torch.rand(500, 64), torch.randint(0, 5, (500,))
            weights = dict(model.named_parameters())
            for _ in range(2):
                inner = F.cross_entropy(functional_call(model, weights, rows), kinds)
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                weights = {
                    name: p - 0.05 * slope for (name, p), slope in zip(weights.items(), slopes, strict=True)
                }
            total = total + F.cross_entropy(functional_call(model, weights, rows), kinds)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        found += [digest(total), *state_digests(model)]
    return found


class _Energy(nn.Module):
    """Of atoms, and, as the gradient by their places, the forces on them: asked for inside the module."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, 32)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32)) for _ in range(2)
        )
        self.updates = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.out = nn.Linear(32, 1)
        self.register_buffer("centers", torch.linspace(0, 5, 16))

    def forward(self, kinds, places, one, other):
        places = places.requires_grad_()
        apart = (places[one] - places[other]).norm(dim=1, keepdim=True)
        basis = torch.exp(-2 * (apart - self.centers) ** 2)
        x = self.kinds(kinds)
        for filter_, update in zip(self.filters, self.updates, strict=True):
            message = x[other] * filter_(basis)
            x = x + F.silu(update(torch.zeros_like(x).index_add(0, one, message)))
        energy = self.out(x).sum()
        (slope,) = torch.autograd.grad(energy, places, create_graph=True)
        return energy, -slope


def forces(steps: int) -> list[str]:
    model = _Energy()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    pairs = torch.combinations(torch.arange(40))
    one, other = torch.cat([pairs, pairs.flip(1)]).T
    found = []
    for _ in range(steps):
        energy, force = model(torch.randint(0, 5, (40,)), torch.randn(40, 3), one, other)
        loss = energy**2 + (force - torch.randn_like(force)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


def curvature(steps: int) -> list[str]:
    """As AdaHessian does: backward makes a graph, of whose gradients a product with the Hessian is taken."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(500, 32)), torch.randint(0, 4, (500,)))
        optimizer.zero_grad()
        loss.backward(create_graph=True)
        slopes = [p.grad for p in model.parameters()]
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in slopes]
        for p, second in zip(
            model.parameters(), torch.autograd.grad(slopes, list(model.parameters()), signs), strict=True
        ):
            p.grad = p.grad.detach() / (second.abs() + 1)
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


class _Curved(torch.optim.Optimizer):
    """As AdaHessian does: the step asks for the product with the Hessian, and then writes the parameters; or, where it `decays` them before,
    as well before it asks, out of autograd's sight."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, decays: bool) -> None:
        super().__init__(parameters, {})
        self._decays = decays

    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        if self._decays:
            with torch.no_grad():
                for p in group["params"]:
                    p.data.mul_(0.9)
        slopes = [p.grad for p in group["params"]]
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in slopes]
        seconds = torch.autograd.grad(slopes, group["params"], signs)
        with torch.no_grad():
            for p, slope, second in zip(group["params"], slopes, seconds, strict=True):
                p.sub_(0.1 * slope.detach() / (second.abs() + 1))


def curvature_in_the_step(steps: int, *, decays: bool = False) -> list[str]:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = _Curved(model.parameters(), decays=decays)
    found = []
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(500, 32)), torch.randint(0, 4, (500,)))
        loss.backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        found += [digest(loss), *(digest(p) for p in model.parameters())]
    return found


LOOPS = [
    physics_informed,
    gradient_penalty,
    meta_learning,
    meta_learning_in_batches,
    forces,
    curvature,
    curvature_in_the_step,
]


def for_each(problem: Problem) -> Decisions:
    """All is recomputed, and what is asked for again and again for each that asks."""
    found = {}
    for storage, candidate in problem.candidates.items():
        if candidate.chain is not None:
            found[storage] = RECOMPUTE_EACH if RECOMPUTE_EACH in candidate.options else RECOMPUTE
    return found


CHOICES = {
    "each": for_each,
    "again": all_again,
    "mixture 4": any_mixture(4),
    "mixture 5": any_mixture(5),
    "mixture 6": any_mixture(6),
    "recompute": everything("recompute"),
    "swap": everything("swap"),
    "mixture": any_mixture(3),
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_graph_of_gradients_holds_leaves_and_comes_back(loop, choice, tmp_path: Path) -> None:
    plan = plan_of(recorded(loop, tmp_path), CHOICES[choice])
    assert any(action.leaves_after is not None or action.each for action in plan.actions)
    computed, outcome = enforced(loop, plan, tmp_path, 6, measure=True)
    assert computed == seeded(loop, 6)
    assert outcome.divergences == 0
    assert (outcome.actions.done, outcome.actions.planned) == (len(plan.actions),) * 2
    assert outcome.measured_peak_bytes is not None
    assert abs(outcome.measured_peak_bytes / plan.predicted_peak_bytes - 1) < 0.01


def test_a_walk_over_plans_that_make_again_for_each_is_as_exact_as_simulating_each_whole(
    tmp_path: Path,
) -> None:
    _, problem = problem_of(recorded(forces, tmp_path))
    candidates, draw = list(problem.candidates.values()), random.Random(1)
    assert any(RECOMPUTE_EACH in candidate.options for candidate in candidates)
    decisions: Decisions = {}
    for _ in range(60):
        for candidate in draw.choices(candidates, k=draw.choice((1, 2, 5, 30))):
            option = draw.choice((None, *candidate.options))
            decisions.pop(candidate.storage, None)
            if option is not None:
                decisions[candidate.storage] = option
        walked = problem.simulator.run(decisions)
        whole = Simulator(problem.view).run(decisions, whole=True)
        assert (walked.high_bytes == whole.high_bytes).all()
        assert walked.step_ms == pytest.approx(whole.step_ms)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_a_step_may_write_what_it_asks_for_gradients_of_later(tmp_path: Path) -> None:
    """A plan of the loop that does not, so that what stands on the parameters is away when they are written."""
    plan = plan_of(recorded(curvature_in_the_step, tmp_path), everything("recompute"))
    decaying = partial(curvature_in_the_step, decays=True)
    computed, outcome = enforced(decaying, plan, tmp_path, 6)
    assert computed == seeded(decaying, 6)
    assert outcome.actions.done == outcome.actions.planned > 0
