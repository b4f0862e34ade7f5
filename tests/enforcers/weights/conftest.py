"""What the tests of weights that leave share."""

from __future__ import annotations

import pytest

from memopt.enforcers.weights.watched import WatchedWeights


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[WatchedWeights]:
    """Those that were installed, in order: they tell what is away."""
    found: list[WatchedWeights] = []
    install = WatchedWeights.install
    monkeypatch.setattr(WatchedWeights, "install", lambda self: (found.append(self), install(self))[0])
    return found
