"""Where a script needs most before it trains, an estimate says so, and what training itself takes."""

from __future__ import annotations

from pathlib import Path

from memopt.estimators.estimate import Estimate, estimate_script

NUMBERS = 1_000_000
SCRIPT = """
import torch
SETUP
weight = torch.nn.Parameter(torch.ones(1000))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(4):
    (torch.randn(100, 1000) * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def estimated(folder: Path, setup: str) -> Estimate:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("SETUP", setup))
    return estimate_script([str(path)], device="cpu")


def said(found: Estimate) -> list[str]:
    return [note for note in found.notes if "before the first optimizer step" in note]


def test_a_peak_while_the_model_is_built_is_told_beside_what_training_takes(tmp_path: Path) -> None:
    """e3nn normalises an activation by a million random numbers."""
    plain = estimated(tmp_path, "pass")
    found = estimated(tmp_path, f"scale = torch.randn({NUMBERS}).pow(2).mean()")
    assert found.allocated_bytes == 2 * 4 * NUMBERS
    (note,) = said(found)
    assert note.endswith(f"after it, up to {plain.allocated_bytes / 1024:.0f} KiB")
    assert said(plain) == []


def test_a_peak_of_the_first_step_that_later_ones_come_near_is_not(tmp_path: Path) -> None:
    assert said(estimated(tmp_path, "start = torch.ones(1)")) == []
