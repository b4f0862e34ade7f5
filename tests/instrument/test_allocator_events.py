"""No profile outlives the thread that it watches: torch would complain on stderr, or the process die as it exits."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch

from memopt.instrument.memory.allocator_events import Started, started_profile, stop_profile

_LEFT_BY_ALL = """
import threading, torch
from memopt.instrument.memory.allocator_events import started_profile, stop_profile

kept = []
def work():
    kept.append(started_profile())
    torch.ones(3) + 1

thread = threading.Thread(target=work)
thread.start(), thread.join()
kept.append(started_profile())
thread = threading.Thread(target=stop_profile, args=(kept[1],))
thread.start(), thread.join()
print(len(kept))
"""


def test_it_ends_with_its_thread() -> None:
    started: list[Started | None] = []
    thread = threading.Thread(target=lambda: started.append(started_profile()))
    thread.start()
    thread.join()
    (only,) = started
    assert only is not None
    assert only.stopped
    assert stop_profile(only) is None


def test_what_another_thread_could_not_stop_ends_when_the_next_begins() -> None:
    first = started_profile()
    assert first is not None
    thread = threading.Thread(target=stop_profile, args=(first,))
    thread.start()
    thread.join()
    assert not first.stopped
    second = started_profile()
    assert first.stopped
    assert second is not None
    made = torch.ones(1000)
    events = stop_profile(second)
    assert events is not None
    assert made.nbytes in {size for _, _, size in events}


def test_a_process_that_leaves_profiles_ends_as_without_them() -> None:
    done = subprocess.run([sys.executable, "-c", _LEFT_BY_ALL], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
