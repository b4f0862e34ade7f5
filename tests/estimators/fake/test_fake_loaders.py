"""Loader workers on a CPU: what they hold is theirs, and a batch counts from when it is received."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.estimators.estimate import Estimate, estimate_script

SAMPLE = 1 << 20
SCRIPT = """
import torch
class Noise(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, at): return {{"x": torch.randn(4, 1 << 18)[0], "label": at % 10}}
model = torch.nn.Linear(1 << 18, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(Noise(), 4{more}):
    model(batch["x"]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def estimated(folder: Path, more: str) -> Estimate:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(more=more))
    return estimate_script([str(script)], device="cpu")


@pytest.mark.parametrize(("workers", "early"), [(1, ""), (3, "up to 8.00 MiB, one of each other worker")])
def test_a_workers_samples_are_its_own(tmp_path: Path, workers: int, early: str) -> None:
    """Weight, the batch before and this one; loaded in the process, samples of four times the size lie beside them."""
    alone = estimated(tmp_path, "")
    found = estimated(tmp_path, f", num_workers={workers}, prefetch_factor=2")
    assert 0 <= found.allocated_bytes - SAMPLE * (1 + 4 + 4) < 1000
    assert alone.allocated_bytes >= SAMPLE * (1 + 4 + 4 * 4)
    assert (
        any(early in each for each in found.left_out)
        if early
        else "before their turn" not in str(found.left_out)
    )
