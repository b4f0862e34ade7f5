"""What is made of something that backward is done with first is made again before that goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_EARLY, Decision
from memopt.plan import Plan
from tests.support.enforced import SWAP, enforced, plan_of, recorded, seeded

STEPS = 6
pytestmark = pytest.mark.filterwarnings("ignore")


def encoder(steps: int) -> list[str]:
    """torch's own attention: queries and keys are made of one product with the values, whose backward comes first."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = net(torch.randn(4, 24, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [digest(loss), *(digest(value) for value in net.state_dict().values())]
    return found


def early(problem: Problem) -> Decisions:
    """All that can be made early."""
    return {s: RECOMPUTE_EARLY for s, c in problem.candidates.items() if RECOMPUTE_EARLY in c.options}


def and_all_else(decision: Decision) -> Callable[[Problem], Decisions]:
    """A choice that makes the rest go, too."""

    def choose(problem: Problem) -> Decisions:
        rest = {s: decision for s, c in problem.candidates.items() if c.option("recompute") is not None}
        return rest | early(problem)

    return choose


def ops_of(plan: Plan) -> set[str]:
    return {op.name for action in plan.actions for op in action.records}


def test_slices_of_one_product_are_made_without_it(tmp_path: Path) -> None:
    trace = recorded(encoder, tmp_path)
    chosen = plan_of(trace, early)
    late = plan_of(trace, lambda problem: dict.fromkeys(early(problem), RECOMPUTE))
    assert len(chosen.actions) == len(late.actions) >= 6
    assert any("mm" in name for name in ops_of(late))
    assert not any("mm" in name for name in ops_of(chosen))
    assert chosen.predicted_step_ms < late.predicted_step_ms


@pytest.mark.parametrize(
    "choose",
    [early, and_all_else(RECOMPUTE), and_all_else(SWAP)],
    ids=["alone", "with recomputation", "with swaps"],
)
def test_it_has_the_same_bits_and_the_predicted_peak(
    choose: Callable[[Problem], Decisions], tmp_path: Path
) -> None:
    plain = seeded(encoder, STEPS)
    plan = plan_of(recorded(encoder, tmp_path), choose)
    assert sum(action.kind == "recompute" and action.prefetch is not None for action in plan.actions) >= 6
    computed, outcome = enforced(encoder, plan, tmp_path, STEPS, measure=True)
    assert computed == plain
    assert (outcome.actions.done, outcome.actions.skipped) == (len(plan.actions), 0)
    assert outcome.measured_peak_bytes == outcome.predicted_peak_bytes


def test_where_its_moment_does_not_come_it_is_made_when_it_is_asked_for(tmp_path: Path) -> None:
    plain = seeded(encoder, STEPS)
    plan = plan_of(recorded(encoder, tmp_path), early)
    never = [
        replace(action, prefetch=replace(action.prefetch, ordinal=10_000))
        for action in plan.actions
        if action.prefetch is not None
    ]
    computed, outcome = enforced(encoder, replace(plan, actions=never), tmp_path, STEPS)
    assert computed == plain
    assert outcome.actions.done == len(never) >= 6
