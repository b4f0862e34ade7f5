"""What a thread waits for a processor is no time of its ops, nor of a plain step beside which the planner begins."""

from __future__ import annotations

import time

import pytest

from memopt.profiler.timing import run_queue
from memopt.profiler.timing.clock import TimeOnly
from memopt.profiler.timing.run_queue import Stretch, waited_ms


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the thread has waited is said to be the last of these."""
    found = [5.0]
    monkeypatch.setattr(run_queue, "waited_ms", lambda: found[-1])
    return found


def test_the_kernel_tells_what_a_thread_has_waited() -> None:
    before = waited_ms()
    time.sleep(0.01)
    assert 0 <= before <= waited_ms()


def test_half_of_a_stretch_was_waited_for(waits: list[float]) -> None:
    stretch = Stretch()
    time.sleep(0.04)
    waits.append(25.0)
    assert 0.4 <= stretch.ends() < 1.0, "20 of 40 ms, or of more where the machine is busy"
    assert stretch.ends() == 1.0, "another one has begun"


def test_ops_take_what_they_ran(waits: list[float]) -> None:
    clock = TimeOnly()
    clock.start()
    for op in range(2):
        clock.run(op, time.sleep, (0.02,), {})
    before = sum(clock.time_us)
    waits.append(25.0)
    clock.stop()
    assert 0.3 * before < sum(clock.time_us) < 0.95 * before


def test_a_kernel_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", absent)
    assert waited_ms() == 0.0
    assert Stretch().ends() == 1.0
