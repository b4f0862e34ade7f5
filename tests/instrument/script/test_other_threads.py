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


@pytest.fixture
def done() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class Own(threading.Thread):
    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def run(self) -> None:
        self._wait()


def _waits(event: threading.Event) -> None:
    event.wait()


MADE: dict[str, Callable[[threading.Event], threading.Thread]] = {
    "a function": lambda event: threading.Thread(target=_waits, args=(event,)),
    "a partial function": lambda event: threading.Thread(target=functools.partial(_waits, event)),
    "a class": lambda event: Own(event.wait),
    "a timer": lambda event: threading.Timer(0.0, event.wait),
    "a library's function, which no code tells of": lambda event: threading.Thread(target=queue.SimpleQueue().get, daemon=True),
}  # fmt: skip


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_thread_of_the_scripts(
    make: Callable[[threading.Event], threading.Thread], done: threading.Event
) -> None:
    thread = make(done)
    assert thread not in threads_of_the_script()
    thread.start()
    assert thread in threads_of_the_script()


def test_pools_run_what_they_are_given(done: threading.Event) -> None:
    with ThreadPoolExecutor(1) as executor, ThreadPool(1) as pool:
        executor.submit(done.wait)
        pool.apply_async(done.wait)
        assert any("ThreadPoolExecutor" in each.name for each in threads_of_the_script())
        assert any("worker" in each.name for each in threads_of_the_script())
        done.set()


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
