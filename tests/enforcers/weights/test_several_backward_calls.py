"""Weights leave before each backward call of an iteration: micro-batches of an accumulated step, a discriminator and its generator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.advisors.profiles.lower_bound import least_step_ms
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import RECOMPUTE
from memopt.estimators.simulator.trace_view import TraceView
from memopt.plan import Plan
from memopt.trace import Trace
from tests.support.enforced import SWAP, Loop, enforced, plan_of, problem_of, recorded, seeded, state_digests

WIDTH = 512
WEIGHT_BYTES = 4 * WIDTH * WIDTH
MICRO = 3


def accumulated(steps: int, *, frozen: bool = True) -> list[str]:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not frozen) for _ in range(4)]
    model = nn.Sequential(nn.Linear(16, WIDTH), *(m for each in layers for m in (each, nn.Tanh())))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(steps):
        for _ in range(MICRO):
            loss = model(torch.randn(256, 16)).square().mean() / MICRO
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [digest(loss), *state_digests(model)]
    return found


def trained(steps: int) -> list[str]:
    return accumulated(steps, frozen=False)


def adversarial(steps: int) -> list[str]:
    """The generator's forward is before the discriminator's backward call, its own backward after that one's step."""
    make = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    makes, judges = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (make, judge))
    found = []
    for _ in range(steps):
        fake = make(torch.randn(512, 16))
        judges.zero_grad()
        judged = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(torch.randn(512, WIDTH))).mean()
        judged.backward()
        judges.step()
        makes.zero_grad()
        made = F.softplus(-judge(fake)).mean()
        made.backward()
        makes.step()
        found += [digest(judged), digest(made), *state_digests(make, judge)]
    return found


def all_away(trace: Trace) -> Plan:
    return plan_of(
        trace, lambda problem: {s: SWAP for s, c in problem.candidates.items() if c.saved.is_weight}
    )


@pytest.mark.parametrize(
    ("loop", "weights", "times"),
    [(accumulated, 4, MICRO), (trained, 4, MICRO), (adversarial, 2, 1.5)],
    ids=["accumulated", "trained", "adversarial"],
)
def test_each_backward_call_has_them_away(loop: Loop, weights: int, times: float, tmp_path: Path) -> None:
    """The generator's is away in the first call alone: the second one's forward reads the discriminator's only."""
    trace = recorded(loop, tmp_path)
    plan = all_away(trace)
    absences = [1 + len(each.leaves_again) for each in plan.actions]
    assert len(absences) == weights
    assert sum(absences) == weights * times
    assert plan.predicted_peak_bytes <= plan.unplanned_peak_bytes - WEIGHT_BYTES
    computed, outcome = enforced(loop, plan, tmp_path, 4, measure=True)
    assert computed == seeded(loop, 4)
    assert outcome.actions.done == weights, outcome.notes
    assert outcome.measured_peak_bytes is not None
    assert 0.75 < outcome.measured_peak_bytes / plan.predicted_peak_bytes < 1.01  # copies may end sooner
    assert not list(tmp_path.glob("*swap*"))


def test_what_is_made_again_brings_them_back_in_each_call(tmp_path: Path) -> None:
    """A replay reads a weight long before its own backward does, in every micro-batch."""

    def choose(problem: Problem) -> Decisions:
        return {
            s: SWAP if c.saved.is_weight else RECOMPUTE
            for s, c in problem.candidates.items()
            if c.saved.is_weight or c.chain is not None
        }

    trace = recorded(trained, tmp_path)
    plan = plan_of(trace, choose)
    assert any(action.kind == "recompute" for action in plan.actions)
    computed, outcome = enforced(trained, plan, tmp_path, 4, measure=True)
    assert computed == seeded(trained, 4)
    assert outcome.actions.skipped == 0, outcome.notes
    assert outcome.measured_peak_bytes is not None
    assert outcome.measured_peak_bytes <= 1.01 * plan.predicted_peak_bytes


def test_a_weight_that_is_rewritten_before_backward_stays(tmp_path: Path) -> None:
    """A target network that follows in each micro-batch, after its forward."""

    def loop(steps: int) -> list[str]:
        base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(steps):
            for _ in range(2):
                x = torch.randn(64, WIDTH)
                wanted = base(x)
                with torch.no_grad():
                    base.weight.lerp_(model.weight, 0.1)
                (model(x) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found += state_digests(base, model)
        return found

    view = TraceView(recorded(loop, tmp_path))
    away = [each for each in view.saved.values() if each.is_weight]
    assert [len(each.again) for each in away] == [1]  # the trained one


def test_calls_that_cannot_be_told_apart_have_none_away(tmp_path: Path) -> None:
    """Two that follow one another at once."""

    def loop(steps: int) -> list[str]:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            out = model(torch.randn(64, WIDTH))
            gradient = torch.ones_like(out)
            out.backward(gradient, retain_graph=True)
            out.backward(gradient)
            optimizer.step()
            optimizer.zero_grad()
        return state_digests(model)

    trace = recorded(loop, tmp_path)
    assert trace.facts["backward_calls"] == 2
    assert not any(each.is_weight for each in TraceView(trace).saved.values())


@pytest.mark.solver
def test_the_bound_on_the_step_counts_every_call(tmp_path: Path) -> None:
    """Weights that are away in the last call have all the time until then on their way out, and that after it on their way back."""
    trace = recorded(trained, tmp_path)
    _, problem = problem_of(trace)
    away = {s: SWAP for s, c in problem.candidates.items() if c.saved.is_weight}
    timeline = problem.run(away)
    bound = least_step_ms(problem_of(trace, int(1.01 * timeline.peak_bytes) + 1)[1], 5)
    assert bound is not None
    assert bound <= timeline.step_ms
