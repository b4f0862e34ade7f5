"""An op in place whose input autograd cloned is made again from that clone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import RECOMPUTE
from memopt.instrument.ops import CLONE, copies_bytes
from tests.support.enforced import SWAP, Loop, enforced, plan_of, problem_of, recorded, seeded

ACTIVATIONS = (nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Mish, nn.Hardtanh)
STEPS = 6
pytestmark = pytest.mark.filterwarnings("ignore")


def convolutions(activation: type[nn.Module]) -> Loop:
    """Blocks of convolution, batch norm and `activation`, in place as most public nets have it."""

    def loop(steps: int) -> list[str]:
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 8), (8, 8)):
            conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(after), activation(inplace=True)]  # type: ignore[call-arg]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16 * 16, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for _ in range(steps):
            loss = net(torch.randn(4, 3, 16, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [digest(loss), *(digest(value) for value in net.state_dict().values())]
        return found

    return loop


def cloned(changes_from: int) -> Loop:
    """A script with a clone of its own, whose bytes it changes behind autograd's back from one step on."""

    def loop(steps: int) -> list[str]:
        net = nn.Linear(32, 64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for step in range(steps):
            hidden = net(torch.randn(16, 32))
            copy = hidden.clone()
            out = hidden.sigmoid_() * copy
            if step >= changes_from:
                copy.data.add_(1)
            del hidden, copy
            loss = out.square().mean()
            del out
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [digest(loss), *(digest(parameter) for parameter in net.parameters())]
        return found

    return loop


def from_copies(problem: Problem) -> Decisions:
    """Every storage that a copy makes again."""
    return {
        storage: RECOMPUTE
        for storage, candidate in problem.candidates.items()
        if candidate.chain is not None and candidate.chain.copied_back
    }


def from_swapped_copies(problem: Problem) -> Decisions:
    """The same, with the copies swapped."""
    chosen = from_copies(problem)
    chains = [chain for s in chosen if (chain := problem.candidates[s].chain) is not None]
    copies = {problem.view.value_storage[copy] for chain in chains for _, copy in chain.copied_back}
    return chosen | dict.fromkeys(copies, SWAP)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.__name__)
def test_it_has_the_same_bits_and_the_predicted_peak(activation: type[nn.Module], tmp_path: Path) -> None:
    loop = convolutions(activation)
    plain = seeded(loop, STEPS)
    trace = recorded(loop, tmp_path)
    plan = plan_of(trace, from_copies)
    assert len(plan.actions) >= 2
    assert all(action.copied_back for action in plan.actions)
    assert not any("batch_norm" in op.name for action in plan.actions for op in action.records)
    computed, outcome = enforced(loop, plan, tmp_path, STEPS, measure=True)
    assert computed == plain
    assert (outcome.actions.done, outcome.actions.skipped) == (len(plan.actions), 0)
    assert outcome.measured_peak_bytes == outcome.predicted_peak_bytes


@pytest.mark.parametrize("activation", ACTIVATIONS[:2], ids=lambda activation: activation.__name__)
def test_a_clone_that_is_in_a_tier_comes_back_for_it(activation: type[nn.Module], tmp_path: Path) -> None:
    loop = convolutions(activation)
    plain = seeded(loop, STEPS)
    plan = plan_of(recorded(loop, tmp_path), from_swapped_copies)
    assert len(plan.actions) >= 4
    again = [action for action in plan.actions if action.kind == "recompute"]
    assert all(action.copied_back for action in again)
    assert not any("batch_norm" in op.name for action in again for op in action.records)
    computed, outcome = enforced(loop, plan, tmp_path, STEPS, measure=True)
    assert computed == plain
    assert (outcome.actions.done, outcome.actions.skipped) == (len(plan.actions), 0)
    assert outcome.measured_peak_bytes == outcome.predicted_peak_bytes


def test_a_clone_that_is_changed_later_is_copied_back_before(tmp_path: Path) -> None:
    loop = cloned(changes_from=4)
    plain = seeded(loop, STEPS)
    assert plain != seeded(cloned(STEPS), STEPS), "the change makes no difference"
    plan = plan_of(recorded(loop, tmp_path), from_copies)
    assert [op.name for action in plan.actions for op in action.copied_back] == [CLONE]
    computed, outcome = enforced(loop, plan, tmp_path, STEPS)
    assert computed == plain
    assert outcome.actions.done == 1


def test_the_copy_is_not_taken_while_it_is_away_itself(tmp_path: Path) -> None:
    """With the clone dropped as well, all of it is made again from the layer before."""
    trace = recorded(cloned(STEPS), tmp_path)
    _, problem = problem_of(trace)
    (storage,) = from_copies(problem)
    chain = problem.candidates[storage].chain
    assert chain is not None
    copy = problem.view.value_storage[chain.copied_back[0][1]]
    alone, _ = problem.simulator.chains({storage: RECOMPUTE})
    together, _ = problem.simulator.chains({storage: RECOMPUTE, copy: RECOMPUTE})
    assert [trace.op_name(op) for op in alone[storage].ops] == ["aten.sigmoid_.default"]
    assert [trace.op_name(op) for op in together[storage].ops] == ["aten.addmm.default", "aten.sigmoid_.default"]  # fmt: skip
    assert [trace.op_name(op) for op in together[copy].ops] == ["aten.addmm.default", CLONE]


def test_what_counts_as_a_copy() -> None:
    dense = torch.randn(4, 6)
    assert copies_bytes(CLONE, dense, dense.clone())
    assert copies_bytes(CLONE, dense.t(), dense.t().clone())
    assert not copies_bytes(CLONE, dense.t(), dense.t().contiguous()), "laid out otherwise"
    assert not copies_bytes(CLONE, dense[:2], dense[:2].clone()), "a part"
    assert not copies_bytes(CLONE, dense[:1].expand(4, 6), dense[:1].expand(4, 6).clone()), "expanded"
    assert not copies_bytes("aten.neg.default", dense, dense.neg())
