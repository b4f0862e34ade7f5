"""Gates of a recurrent cell: one storage, whose parts are written in place one after the other, and saved as they are written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt.enforcers.verify.digests import digest
from tests.support.enforced import SWAP, Loop, enforced, everything, plan_of, problem_of, recorded, seeded
from tests.support.stepping import everything as all_of

ROWS, WIDTH, LENGTH = 1024, 128, 6


def gated(layer: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    one, other = layer(x).unsafe_chunk(2, 1)
    return one.sigmoid_() * other.tanh_()


def gru(layer: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    return layer(x, h)


def unrolled(
    steps: int, *, make: Callable[[], nn.Module], cell: Callable[..., Tensor], twice: bool = False
) -> list[str]:
    layer, found = make(), []
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(steps):
        h = torch.randn(ROWS, WIDTH)
        for _ in range(LENGTH):
            h = cell(layer, h, h)
        loss = h.square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return [*found, *all_of(layer, optimizer)]


GATED = partial(unrolled, make=lambda: nn.Linear(WIDTH, 2 * WIDTH), cell=gated)
GRU = partial(unrolled, make=lambda: nn.GRUCell(WIDTH, WIDTH), cell=gru)


@pytest.mark.parametrize("loop", [GATED, GRU], ids=["gated", "GRUCell"])
def test_they_are_swapped_once_all_are_written(loop: Loop, tmp_path: Path) -> None:
    """No plan did anything about them: a GRUCell's loop held 46.6 MiB of 31.8, where the guard alone held the budget."""
    trace = recorded(loop, tmp_path)
    _, problem = problem_of(trace, trace.peak_bytes // 2)
    parts = [c for c in problem.candidates.values() if c.saved.written_in_parts]
    assert len(parts) >= LENGTH - 1, "of the last one backward asks at once"
    assert all(option.kind == "swap" for c in parts for option in c.options)
    plan = plan_of(trace, everything("swap"))
    assert {c.storage for c in parts} <= {action.storage for action in plan.actions}
    computed, outcome = enforced(loop, plan, tmp_path, 5, measure=True)
    assert computed == seeded(loop, 5)
    assert outcome.actions.done == outcome.actions.planned > LENGTH
    assert outcome.measured_peak_bytes is not None
    assert abs(outcome.measured_peak_bytes / plan.predicted_peak_bytes - 1) < 0.02
    kept = plan_of(
        trace, lambda p: {s: SWAP for s, c in p.candidates.items() if not c.saved.written_in_parts}
    )
    assert plan.predicted_peak_bytes < 0.9 * kept.predicted_peak_bytes


def test_they_stay_where_the_graph_is_asked_again(tmp_path: Path) -> None:
    trace = recorded(partial(GATED, twice=True), tmp_path)
    _, problem = problem_of(trace, trace.peak_bytes // 2)
    assert not any(each.written_in_parts for each in problem.view.saved.values())
