"""What has no bytes is no reason to end a verified run."""

from __future__ import annotations

import pytest
from torch import nn

from memopt.enforcers.verify import digests
from memopt.enforcers.verify.digests import _state, digest


def test_a_module_without_bytes_is_compared_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func's ensembles are called by way of a module on the meta device; a lazy one has no shape before its first call."""
    whole, lazy = nn.Linear(2, 2), nn.LazyLinear(3)
    shape = nn.Linear(2, 2, device="meta")
    monkeypatch.setattr(digests, "_modules", lambda: [("A.0", whole), ("B.1", shape), ("C.2", lazy)])
    assert set(_state()) == {"A.weight", "A.bias", "B.weight", "B.bias"}
    assert digest(shape.weight) != digest(nn.Linear(3, 2, device="meta").weight)
