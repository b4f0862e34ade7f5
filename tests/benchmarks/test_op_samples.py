"""A seeded part of `benchmarks.op_samples`: samples of torch's own, the same bits plain, profiled and enforced."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.op_samples import KINDS, Held, hold, op_names, samples

pytestmark = pytest.mark.loop
OPS_EACH = 10
ALWAYS = (
    "linalg.pinv",
    "linalg.svdvals",
    "linalg.cond",
    "sigmoid",
    "prod",
    "cumprod",
    "max",
    "median",
    "linalg.det",
)


@pytest.fixture(autouse=True)
def _no_seeds_kept_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the ten thousand seeds that the samples set is noted, with its stack, for devices that may be there later."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            monkeypatch.setattr(device, "manual_seed_all", lambda seed: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_the_same(kind: str, tmp_path: Path) -> None:
    drawn = random.Random(f"12 {kind}").sample(op_names(), OPS_EACH)
    chosen = list(samples((kind,), (*ALWAYS, *drawn), most=1))
    held = Held()
    hold(chosen, tmp_path, held)
    assert held.different == []
    assert held.compared > OPS_EACH / 2
    assert held.actions > 0


@pytest.mark.filterwarnings("ignore")
def test_the_second_derivative_of_a_matrix_exponential_is_plain_s(tmp_path: Path) -> None:
    """Of a matrix whose exponential overflows NaNs had another sign: the formula looks whether a mode is on."""
    held = Held()
    hold(list(samples(("second",), ("matrix_exp",), most=2)), tmp_path, held)
    assert held.different == []
    assert held.compared == 6
