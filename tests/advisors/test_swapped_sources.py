"""A replay reads what a swap brings back: the copy comes for whoever asks first, and stays for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.device import Device
from memopt.estimators.simulator.costs import replay_ms
from memopt.estimators.simulator.decision import RECOMPUTE, Decision
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.enforced import SWAP, enforced, plan_of, recorded, seeded
from tests.support.layers_trace import build, chain

HOST = Decision(kind="swap", tier="host")


def perceptrons(steps: int) -> list[str]:
    """Blocks of a product, an activation and a product."""
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    for _ in range(steps):
        x = torch.randn(512, 64)
        for up, down in zip(layers[::2], layers[1::2], strict=True):
            x = down(F.gelu(up(x)))
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.item().hex(), *(p.sum().item().hex() for layer in layers for p in layer.parameters())]


def inputs_swapped(problem: Problem) -> Decisions:
    """Swap what the activations read, make again what they gave."""
    chosen: Decisions = {}
    for storage in problem.candidates:
        label = problem.view.trace.storage_label(storage)
        if "gelu" in label:
            chosen[storage] = RECOMPUTE
        elif "addmm" in label or "linear" in label:
            chosen[storage] = SWAP
    return place_prefetches(problem, chosen)


def test_replays_read_what_a_swap_brings_back(tmp_path: Path) -> None:
    plan = plan_of(recorded(perceptrons, tmp_path), inputs_swapped)
    assert sorted({action.kind for action in plan.actions}) == ["recompute", "swap"]
    assert {op.name for action in plan.actions for op in action.records} == {"aten.gelu.default"}
    computed, outcome = enforced(perceptrons, plan, tmp_path, 6, measure=True)
    assert computed == seeded(perceptrons, 6)
    assert outcome.actions.done == outcome.actions.planned
    assert plan.predicted_peak_bytes < outcome.unplanned_peak_bytes
    assert abs(plan.predicted_peak_bytes - outcome.measured_peak_bytes) <= 0.02 * plan.predicted_peak_bytes


def test_a_swapped_source_is_priced_by_the_simulator() -> None:
    """Output 2 of the chain is made from output 1: by both their ops when that is dropped, by its own when a copy comes back for it."""
    device = Device(kind="cuda", host_out_bytes_per_s=4e5, host_in_bytes_per_s=4e5)  # 1 ms a copy
    trace = build(chain([400] * 6, [9, 100, 1, 9, 9, 9]), device=device)
    view = TraceView(trace)
    simulator = Simulator(view, device)
    before, target = 2 + 1, 2 + 2
    both = simulator.run({before: RECOMPUTE, target: RECOMPUTE})
    copied: Decisions = {before: HOST, target: RECOMPUTE}
    found = simulator.run(copied)
    assert both.replay_ms == pytest.approx(101 + 2 * replay_ms(device))
    assert found.replay_ms == pytest.approx(1 + replay_ms(device))
    assert found.stall_ms == 1.0, "on demand, nothing hides the copy"
    assert found.peak_bytes == both.peak_bytes
    use = view.saved[target].first_use
    assert simulator.back_by(copied) == {before: use}
    assert use < view.saved[before].first_use
    assert found.live_bytes[use] == simulator.run({}).live_bytes[use]
