"""Of very many saved tensors that a script holds for long, each comes to light once it lets go, the latest at once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.support.enforced import recorded

KEPT, LATEST, IN_TURN = 300, 256, 16


def _keeps_many(steps: int) -> list[str]:
    weight = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        state, kept = weight.exp(), []
        for _ in range(KEPT):
            state = state.sin()
            kept.append(state)
        kept.clear()
        for _ in range(40):
            state = state.cos()
        state.sum().backward()
        optimizer.step()
    return []


def test_what_was_held_for_long_comes_to_light_soon_after_it_was_let_go(tmp_path: Path) -> None:
    trace = recorded(_keeps_many, tmp_path)
    names = [trace.strings[name] for name in trace.ops.name]
    sines = [op for op, name in enumerate(names) if name == "aten.sin.default"][:KEPT]
    seen = {
        birth: since
        for birth, since in zip(trace.storages.birth_op, trace.storages.only_saved_from, strict=True)
        if birth in sines
    }
    let_go = sines[-1] + 1
    assert names[let_go] == "aten.cos.default"
    late = [seen[op] - sines[-1] for op in sines]
    early = late[: KEPT - LATEST + 1]
    assert late[len(early) : -1] == [0] * (LATEST - 2)
    assert late[-1] == 1, "the first cosine reads it"
    assert all(0 <= ops <= len(early) // IN_TURN + 1 for ops in early)
    assert max(early) > 0
