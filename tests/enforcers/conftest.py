"""What several tests of enforcers watch."""

from __future__ import annotations

import pytest

from memopt.enforcers.optimizer.gradients_elsewhere import GradientsElsewhere


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients were away at once, of each that sends them."""
    found: list[int] = []
    remove = GradientsElsewhere.remove

    def told(self: GradientsElsewhere) -> None:
        found.append(self.most_away)
        remove(self)

    monkeypatch.setattr(GradientsElsewhere, "remove", told)
    return found
