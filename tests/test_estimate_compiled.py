"""Compiled modules on the CPU: inductor's buffers, not the eager run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.estimators.estimate import Estimate, estimate_script

WEIGHT = 4 << 20
SCRIPT = """
import copy, torch
class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(1 << 20))
    def forward(self, *, scale, mask):
        {extra}return {{"loss": (self.weight.sin().cos().tanh() * scale).sum()}}
class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(Waves())
    def forward(self, scale, mask=None):
        return self.inner(scale=scale, mask=mask)["loss"] * 2
{make}
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    loss = model(torch.ones(1))
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def estimated(folder: Path, make: str, extra: str = "") -> Estimate:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(make=make, extra=extra))
    found = estimate_script([str(script)], device="cpu")
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    return found


@pytest.mark.parametrize(
    "make",
    [
        "model = Both(); model.compile()",
        "model = copy.deepcopy(torch.compile(Both()))\nassert model._orig_mod is model",
    ],
    ids=["one in another", "a copy"],
)
def test_what_inductor_fuses_is_not_allocated(tmp_path: Path, make: str) -> None:
    """The weight and its gradient; eagerly, three more are saved, and backward makes one on its way."""
    found = estimated(tmp_path, make)
    assert 0 <= found.allocated_bytes - 2 * WEIGHT < 1000
    assert not any("torch.compile" in note for note in found.notes)


@pytest.mark.parametrize(
    ("make", "extra", "said"),
    [
        ("model = Both()", "scale.item(); ", "could not be followed (DataDependentOutputException"),
        ("model = torch.compile(Both(), backend='eager'); model.inner.forward = model.inner.forward.eager", "", "was not applied"),
    ],
    ids=["depends on data", "another backend"],
)  # fmt: skip
def test_what_cannot_be_traced_runs_eagerly(tmp_path: Path, make: str, extra: str, said: str) -> None:
    found = estimated(tmp_path, make, extra)
    assert found.allocated_bytes >= 5 * WEIGHT
    assert any(said in note for note in found.notes)
