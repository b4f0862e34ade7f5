"""What the tests of weights that leave share."""

from __future__ import annotations

import pytest

from memopt.enforcers.weights.away import WeightsAway


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[WeightsAway]:
    """Those that were installed, in order: they tell what is away."""
    found: list[WeightsAway] = []
    install = WeightsAway.install
    monkeypatch.setattr(WeightsAway, "install", lambda self: (found.append(self), install(self))[0])
    return found
