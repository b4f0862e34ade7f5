"""What a thread waits for a processor is no time of its ops, nor of a plain step beside which the planner begins."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from memopt.instrument.iterations import Iterations
from memopt.instrument.script import run_queue
from memopt.instrument.script.run_queue import Stretch, waited_ms
from memopt.profiler.timing.clock import TimeOnly


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
    assert 0.4 <= stretch.share < 1.0, "20 of 40 ms, or of more where the machine is busy"
    stretch.begin()
    assert stretch.share == 1.0


def test_another_thread_has_waited_for_other_things(waits: list[float]) -> None:
    stretch, found = Stretch(), list[float]()
    waits.append(25.0)
    thread = threading.Thread(target=lambda: found.append(stretch.share))
    thread.start()
    thread.join()
    assert found == [1.0]
    assert stretch.share < 1.0


def test_ops_take_what_they_ran(waits: list[float]) -> None:
    clock = TimeOnly()
    clock.start()
    for op in range(2):
        clock.run(op, time.sleep, (0.02,), {})
    before = sum(clock.time_us)
    waits.append(25.0)
    clock.stop()
    assert 0.3 * before < sum(clock.time_us) < 0.95 * before


def test_an_iteration_takes_what_the_thread_ran(waits: list[float]) -> None:
    times, before = list[float](), time.perf_counter()
    listener = SimpleNamespace(
        iteration_ended=lambda count, milliseconds: times.append(milliseconds),
        step_begins=lambda optimizer: waits.append(waits[-1] + 20.0),
        step_ended=lambda optimizer: None,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    iterations = Iterations(listener)  # type: ignore[arg-type]
    iterations.install()
    try:
        for _ in range(3):
            time.sleep(0.04)
            optimizer.step()
    finally:
        iterations.remove()
    took_ms = 1000 * (time.perf_counter() - before)
    assert len(times) == 3
    assert 0 < sum(times) <= took_ms - 60.0
    assert 0 < iterations.waited_share < 0.51


def test_a_kernel_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", absent)
    assert waited_ms() == 0.0
    assert Stretch().share == 1.0
