"""Saved tensors that outlive their iteration, or that no backward asks for: a variable holds their graph until the next iteration gives it another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.enforcers.guarding.left_over import send_away
from memopt.enforcers.guarding.live_bytes import Live
from memopt.enforcers.tiers.per_device import offload_tier
from memopt.enforcers.verify.digests import digest
from memopt.instrument.saved import Kept
from memopt.plan import Plan
from memopt.trace import Trace
from tests.support.enforced import enforced, everything, recorded, seeded, state_digests

MIB = 1 << 20


def layers() -> nn.Sequential:
    """Each of its activations has 1 MiB."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])


def backward_again(at: int, step: int, old: Tensor | None) -> None:
    """In iteration `at`, through the graph that the one before has left."""
    if step == at and old is not None:
        old.backward()


def retained(steps: int, again_at: int = -1) -> list[str]:
    """`retain_graph=True` where nobody asks again: a habit."""
    model, found = layers(), list[str]()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))])
    loss = None
    for step in range(steps):
        optimizer.zero_grad()
        model.zero_grad()
        backward_again(again_at, step, loss)
        loss = model(torch.rand(1024, 256)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


def only_looked_at(steps: int, again_at: int = -1) -> list[str]:
    """A generator's output, which its critic learns from, and whose graph nobody needs."""
    generator, critic, found = layers(), nn.Linear(256, 1), list[str]()
    optimizer = torch.optim.Adam(critic.parameters())
    made = None
    for step in range(steps):
        generator.zero_grad()
        backward_again(again_at, step, made.mean() if made is not None else None)
        made = generator(torch.rand(1024, 256))
        loss = critic(made.detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(generator, critic)]
    return found


def thrown_away(steps: int) -> list[str]:
    """An evaluation that records a graph, which goes before the iteration ends."""
    model, found = layers(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        seen = model(torch.rand(1024, 256)).mean()
        loss = model(torch.rand(256, 256)).square().mean() + model(torch.rand(256, 256)).mean()
        found.append(digest(seen))
        del seen
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


LOOPS = [retained, only_looked_at, thrown_away]


@pytest.fixture(scope="module", params=LOOPS, ids=lambda loop: loop.__name__)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Callable[..., list[str]], Trace, Plan]:
    loop = request.param
    trace = recorded(loop, tmp_path_factory.mktemp(loop.__name__))
    return loop, trace, Adviser(trace, allowed((), ())).plan(int(0.6 * trace.peak_bytes))


def test_they_are_away_until_the_next_iteration_has_let_go_of_them(
    case: tuple[Callable[..., list[str]], Trace, Plan], tmp_path: Path
) -> None:
    loop, trace, plan = case
    assert plan.predicted_peak_bytes <= plan.budget_bytes < 0.61 * trace.peak_bytes
    computed, outcome = enforced(loop, plan, tmp_path, 6, measure=True)
    assert computed == seeded(loop, 6)
    assert outcome.actions.done == outcome.actions.planned == len(plan.actions) > 0
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.02)


@pytest.mark.parametrize("loop", [retained, only_looked_at])
def test_a_backward_that_asks_after_all_gets_the_same(loop: Callable[..., list[str]], tmp_path: Path) -> None:
    plan_for = Adviser(recorded(loop, tmp_path), allowed((), ()))
    plan = plan_for.plan(int(0.6 * plan_for.unplanned_peak_bytes))
    asks = partial(loop, again_at=4)
    computed, outcome = enforced(asks, plan, tmp_path, 6)
    assert outcome.actions.done > 0
    assert computed == seeded(asks, 6)
    assert computed[: len(computed) // 2] == seeded(loop, 6)[: len(computed) // 2]
    assert computed != seeded(loop, 6)


def test_no_more_leaves_than_the_budget_asks_for(tmp_path: Path) -> None:
    trace = recorded(only_looked_at, tmp_path)
    plan = Adviser(trace, allowed((), ())).plan(int(0.9 * trace.peak_bytes))
    assert 0 < sum(action.size_bytes for action in plan.actions) < 0.3 * trace.peak_bytes


def test_what_the_recorded_iteration_has_left_leaves_with_it(tmp_path: Path) -> None:
    tensors = [torch.rand(512, 512) for _ in range(3)]
    held = tensors[0]
    kept = [Kept(tensor) for tensor in tensors]
    kept.append(Kept(tensors[1].t()))
    before = [digest(each.tensor) for each in kept]
    del tensors
    tier = offload_tier(tmp_path)
    send_away(kept, tier)
    assert [each.tensor.untyped_storage().nbytes() // MIB for each in kept] == [1, 0, 0, 0]
    assert [digest(each.get()) for each in kept] == before
    assert digest(held) == before[0]
    tier.close()


def with_an_evaluation(
    steps: int, *, again_at: int = -1, trains: int = 6, seen: list[int] | None = None
) -> list[str]:
    """Every third iteration; a variable holds its result, and what that was computed from. The first `trains` layers are stepped."""
    model, found = layers(), list[str]()
    optimizer = torch.optim.SGD(model[:trains].parameters(), 0.1)
    held = None
    for step in range(steps):
        if step % 3 == 2 and steps > 4:
            held = model(torch.rand(1024, 256)).mean()
        backward_again(again_at, step, held)
        loss = model(torch.rand(1024, 256)).square().mean()
        loss.backward()
        found += [digest(loss), *state_digests(model)]
        del loss
        optimizer.step()
        model.zero_grad()
        if seen is not None and step > 2:
            seen.append(Live("cpu").look_around().now() // MIB)
    return found


@pytest.mark.parametrize(("trains", "again_at"), [(6, -1), (1, 7)])
def test_what_a_step_has_made_again_for_a_graph_that_lives_on_leaves(
    trains: int, again_at: int, tmp_path: Path
) -> None:
    """A plan takes the evaluation's calls for those that train: what it had dropped there was made before the parameters changed, and stayed.
    Through stepped weights of the later layers no backward could go, whether memopt is there or not."""
    loop, seen = partial(with_an_evaluation, trains=trains, again_at=again_at), list[int]()
    adviser = Adviser(
        recorded(partial(with_an_evaluation, trains=trains), tmp_path), allowed(("recompute",), ())
    )
    problem = adviser.problem(1)
    plan = adviser.write(problem, everything("recompute")(problem), "chosen by a test")
    computed, outcome = enforced(partial(loop, seen=seen), plan, tmp_path, 9, holds_bytes=8 * MIB)
    assert computed == seeded(loop, 9)
    assert outcome.actions.done > 0
    assert max(seen) <= 7  # parameters and gradients have 3 MiB, the evaluation's graph 12 and its input one
