"""What is made again has the bits of forward though the script has switched, since then, what kernels read beside their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.enforcers.kernel_settings import SETTINGS
from memopt.enforcers.verify.digests import digest
from tests.support.enforced import all_again, enforced, plan_of, recorded, seeded, state_digests


@contextmanager
def _around(write: Callable[[Any], Any], inside: Any, outside: Any) -> Iterator[None]:
    write(inside)
    try:
        yield
    finally:
        write(outside)


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "matmul precision": lambda: _around(torch.set_float32_matmul_precision, "medium", "highest"),
    "convolutions": lambda: torch.backends.mkldnn.flags(enabled=False),
    "default dtype": lambda: _around(torch.set_default_dtype, torch.float64, torch.float32),
    "denormals": lambda: _around(torch.set_flush_denormal, True, False),
    "threads": lambda: _around(torch.set_num_threads, 2, 1),
}
"""What a script may have on for its forward alone."""


@contextmanager
def _as_found() -> Iterator[None]:
    """Torch's own tests, once imported, let flags be set in a `with` only."""
    before = SETTINGS.now()
    try:
        with getattr(torch.backends, "__allow_nonbracketed_mutation")():
            yield
    finally:
        SETTINGS.switch(before)


class Net(nn.Module):
    """Each switch moves the bits of one of its ops."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.inner = nn.Linear(512, 512)
        self.last = nn.Linear(512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.conv(x).flatten(1))
        thirds = (torch.arange(h.numel()).view_as(h) % 7) / 3
        h = torch.tanh(self.inner(h)) * thirds.to(h.dtype).exp()
        tiny = (h.detach() * 1e-39) * 1e38
        return self.last(torch.sigmoid(h + torch.cat([h] * 64).exp().mean()) * tiny.cos())


def _loop(switch: str) -> Callable[[int], list[str]]:
    def loop(steps: int) -> list[str]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        found = []
        for _ in range(steps):
            x = torch.randn(64, 8, 8, 8)
            with SWITCHES[switch]():
                loss = F.cross_entropy(model(x).float(), torch.arange(64) % 4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [digest(loss), *state_digests(model)]
        return found

    return loop


pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # what `mkldnn.flags` says


@pytest.mark.parametrize("switch", SWITCHES)
def test_forwards_settings_are_those_of_a_replay(switch: str, tmp_path: Path) -> None:
    with _as_found():
        torch.set_num_threads(1)
        loop = _loop(switch)
        plain = seeded(loop, 4)
        plan = plan_of(recorded(loop, tmp_path), all_again)
        computed, outcome = enforced(loop, plan, tmp_path, 4)
        assert outcome.actions.done > 0
        assert computed == plain


def test_a_switch_and_the_way_back_leave_precisions_to_their_parents() -> None:
    with _as_found():
        before = SETTINGS.now()
        torch.set_float32_matmul_precision("medium")
        with torch.backends.mkldnn.flags(enabled=False):
            other = SETTINGS.now()
        assert other != before
        SETTINGS.switch(before)
        assert SETTINGS.now() == before
        torch.backends.fp32_precision = "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
        torch.backends.fp32_precision = "none"
        SETTINGS.switch(other)
        assert SETTINGS.now() == other
