"""A search has the processor's time: load by others does not shorten it, nor does waiting last for ever."""

from __future__ import annotations

import time

import pytest

from memopt.advisors.clock import SearchClock


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    found = {"wall": 100.0, "processor": 7.0}
    monkeypatch.setattr(time, "monotonic", lambda: found["wall"])
    monkeypatch.setattr(time, "process_time", lambda: found["processor"])
    return found


@pytest.mark.parametrize(
    ("wall", "worked", "had"),
    [
        (2.0, 2.0, 2.0),
        (2.0, 1.0, 1.0),
        (6.0, 1.0, 2.0),
        (9.0, 0.0, 3.0),
        (2.0, 4.0, 2.0),
    ],
    ids=["alone", "beside another", "hardly let", "waiting", "with threads"],
)
def test_what_a_search_has_had(times: dict[str, float], wall: float, worked: float, had: float) -> None:
    now = SearchClock()
    begin = now()
    times["wall"] += wall
    times["processor"] += worked
    assert now() - begin == pytest.approx(had)
    assert now() - begin == pytest.approx(had)
