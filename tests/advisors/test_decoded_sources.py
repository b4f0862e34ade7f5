"""A replay reads what a codec holds: dropout noise of one bit an element is a source, not drawn again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.estimators.simulator.costs import REPLAY_MS
from memopt.estimators.simulator.decision import RECOMPUTE, Decision
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.enforced import enforced, plan_of, recorded, seeded
from tests.support.layers_trace import build, chain


def attention_like(steps: int) -> list[str]:
    """Two layers of softmax, dropout and a product."""
    layers = [torch.nn.Linear(96, 96) for _ in range(2)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    for _ in range(steps):
        x = torch.randn(24, 96, 96, requires_grad=True)
        for layer in layers:
            x = F.dropout(torch.softmax(layer(x) @ x.mT, dim=-1), 0.1) @ x.tanh()
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.item().hex(), *(p.sum().item().hex() for layer in layers for p in layer.parameters())]


def noise_and_products(problem: Problem) -> Decisions:
    """Compress the noise, make what it was multiplied with again."""
    chosen = {}
    for storage, candidate in problem.candidates.items():
        compressed = candidate.option("compress")
        if compressed is not None and compressed.codec == "two_valued":
            chosen[storage] = compressed
        elif "mul" in problem.view.trace.storage_label(storage).split():
            chosen[storage] = RECOMPUTE
    return chosen


def test_the_noise_is_decoded_not_drawn_again(tmp_path: Path) -> None:
    plan = plan_of(recorded(attention_like, tmp_path), noise_and_products)
    assert sorted(action.kind for action in plan.actions) == [
        "compress",
        "compress",
        "recompute",
        "recompute",
    ]
    again = {op.name for action in plan.actions for op in action.records}
    assert again == {"aten.mul.Tensor"}
    computed, outcome = enforced(attention_like, plan, tmp_path, 6, measure=True)
    assert computed == seeded(attention_like, 6)
    assert outcome.actions.done == 4
    assert plan.predicted_peak_bytes < outcome.unplanned_peak_bytes
    unpacked_bits = 2 * 24 * 96 * 96  # on a CPU numpy holds them
    assert 0 <= plan.predicted_peak_bytes - outcome.measured_peak_bytes <= unpacked_bits


def coded(size: int) -> Decision:
    return Decision(
        kind="compress",
        codec="two_valued",
        encoded_bytes=size // 10,
        transient_bytes=7,
        decoded_bytes=size + 7,
        encode_ms=1,
        decode_ms=2,
    )


def test_a_decoded_source_is_priced_by_the_simulator() -> None:
    """Output 3 of the chain is made from output 2: replayed from output 1 when that is dropped, decoded when it is encoded."""
    trace = build(chain([400] * 6, [9, 100, 1, 9, 9, 9]))
    simulator = Simulator(TraceView(trace))
    through = simulator.run({3: RECOMPUTE, 4: RECOMPUTE})
    decoded = simulator.run({3: coded(400), 4: RECOMPUTE})
    assert through.replay_ms == pytest.approx(101 + 2 * REPLAY_MS)
    chains, kept = simulator.chains({3: coded(400), 4: RECOMPUTE})
    assert [len(chain.ops) for chain in chains.values()] == [1]
    assert not kept
    reads_of_its_own = 1 + 2  # encoded once, decoded for its own consumer
    assert decoded.replay_ms == pytest.approx(reads_of_its_own + 1 + REPLAY_MS + 2)
