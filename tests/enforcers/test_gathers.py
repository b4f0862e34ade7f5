"""What is gathered by indices or a mask is made again: the same values choose the same elements."""

from __future__ import annotations

from pathlib import Path

from tests.support.enforced import enforced, everything, plan_of, recorded, seeded
from tests.support.loops import gathers


def test_what_indices_and_masks_choose_is_made_again(tmp_path: Path) -> None:
    plan = plan_of(recorded(gathers, tmp_path), everything("recompute"))
    assert sum(any(op.name == "aten.index.Tensor" for op in action.records) for action in plan.actions) >= 2
    computed, outcome = enforced(gathers, plan, tmp_path, 6)
    assert computed == seeded(gathers, 6)
    assert outcome.actions.done == outcome.actions.planned
