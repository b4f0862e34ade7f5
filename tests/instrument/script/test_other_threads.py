"""Which threads may run code of the script's."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import QueueListener
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from memopt.instrument.script.other_threads import threads_of_the_script

Gate = queue.SimpleQueue[None]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """What threads wait at until the test is over: one that went on waiting would keep weights from leaving in every later test."""
    before = threading.enumerate()
    gate: Gate = queue.SimpleQueue()
    yield gate
    for thread in set(threading.enumerate()) - set(before):
        gate.put(None)
        thread.join(10)
        assert not thread.is_alive()


class Own(threading.Thread):
    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def run(self) -> None:
        self._wait()


def _waits(gate: Gate) -> None:
    gate.get()


MADE: dict[str, Callable[[Gate], threading.Thread]] = {
    "a function": lambda gate: threading.Thread(target=_waits, args=(gate,)),
    "a partial function": lambda gate: threading.Thread(target=functools.partial(_waits, gate)),
    "a class": lambda gate: Own(gate.get),
    "a timer": lambda gate: threading.Timer(0.0, gate.get),
    "a library's function, which no code tells of": lambda gate: threading.Thread(target=gate.get),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_thread_of_the_scripts(make: Callable[[Gate], threading.Thread], gate: Gate) -> None:
    thread = make(gate)
    assert thread not in threads_of_the_script()
    thread.start()
    assert thread in threads_of_the_script()


def test_pools_run_what_they_are_given(gate: Gate) -> None:
    with ThreadPoolExecutor(1) as executor, ThreadPool(1) as pool:
        executor.submit(gate.get)
        pool.apply_async(gate.get)
        assert any("ThreadPoolExecutor" in each.name for each in threads_of_the_script())
        assert any("worker" in each.name for each in threads_of_the_script())
        gate.put(None)
        gate.put(None)


@pytest.mark.script
def test_threads_of_libraries_are_none() -> None:
    before = set(threads_of_the_script())
    listener = QueueListener(queue.Queue())
    listener.start()
    loader = DataLoader(TensorDataset(torch.zeros(8)), num_workers=1)
    for _ in loader:
        assert set(threads_of_the_script()) == before
        assert threading.active_count() > 1
    listener.stop()


def test_where_another_thread_trains_the_main_one_is_the_scripts() -> None:
    found: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: found.extend(threads_of_the_script()))
    thread.start()
    thread.join()
    assert threading.main_thread() in found
