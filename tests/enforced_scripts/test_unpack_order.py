"""One backward op may ask for several tensors: in which order decides what a replay finds there already."""

from __future__ import annotations

from pathlib import Path

import torch

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN
from tests.support.enforced import enforced, plan_of, recorded


def attention_like(steps: int) -> list[str]:
    """Both inputs of the product come from one dropped tensor, each by a copy of its own."""
    first = torch.nn.Linear(64, 64)
    left, right = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD([*first.parameters(), *left.parameters(), *right.parameters()], lr=0.1)
    for _ in range(steps):
        shared = torch.cat((torch.randn(32, 64, 64), first(torch.randn(32, 64, 64))), 1)
        product = torch.bmm(
            left(shared.transpose(1, 2).contiguous().transpose(1, 2)), right(shared.mul(2)).mT
        )
        loss = product.tanh().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.item().hex()]


def test_the_order_is_recorded(tmp_path: Path) -> None:
    slots = (trace := recorded(attention_like, tmp_path)).slots
    order = {
        trace.strings[slots.slot[row]]: slots.unpack_order[row]
        for row, node in enumerate(slots.node)
        if trace.strings[node] == "BmmBackward0"
    }
    assert set(order) == {"self", "mat2"}
    assert sorted(slots.unpack_order) == list(range(len(slots.unpack_order)))
    assert order["mat2"] < order["self"], "autograd's own order"


def test_what_is_predicted_of_it_is_measured(tmp_path: Path) -> None:
    trace = recorded(attention_like, tmp_path)
    for again in ("clone", "mul", "cat", "nothing"):

        def choose(problem: Problem, again: str = again) -> Decisions:
            able = [s for s, c in problem.candidates.items() if c.option("recompute") is not None]
            return {s: RECOMPUTE_AGAIN if again in trace.storage_label(s) else RECOMPUTE for s in able}

        plan = plan_of(trace, choose)
        _, outcome = enforced(attention_like, plan, tmp_path, 6, measure=True)
        assert outcome.actions.done == outcome.actions.planned > 2
        assert abs(outcome.measured_peak_bytes / plan.predicted_peak_bytes - 1) < 0.01, again


def norms(steps: int) -> list[str]:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.SiLU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(2048, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.item().hex()]


def test_what_backward_has_just_been_given_is_not_made_twice(tmp_path: Path) -> None:
    """The norm's backward asks for its input, then for a statistic: made again from that input, which it holds already."""
    trace = recorded(norms, tmp_path)

    def choose(problem: Problem) -> Decisions:
        able = [s for s, c in problem.candidates.items() if c.option("recompute") is not None]
        names = {s: trace.storage_label(s) for s in able}
        chosen = [s for s, name in names.items() if "silu" in name or ("norm" in name and "×1 " in name)]
        assert len(chosen) >= 2
        return dict.fromkeys(chosen, RECOMPUTE)

    plan = plan_of(trace, choose)
    _, outcome = enforced(norms, plan, tmp_path, 6, measure=True)
    assert outcome.actions.done == outcome.actions.planned
    assert abs(outcome.measured_peak_bytes / plan.predicted_peak_bytes - 1) < 0.01
