"""What the allocators have given out."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from memopt.instrument.live_objects import no_collections
from memopt.instrument.memory import held
from memopt.instrument.memory.allocator_events import started_profile, stop_profile

MIB = 1 << 20


def test_malloc_tells_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_QUICK_S", 60.0)
    held._malloc.cache_clear()
    before = held.held_bytes("cpu")
    if not before:
        pytest.skip("no glibc that can be asked")
    kept = torch.empty(8 * MIB)
    more = held.held_bytes("cpu") - before
    assert abs(more - kept.nbytes) < MIB
    del kept
    assert abs(held.held_bytes("cpu") - before) < MIB


def test_nothing_is_left_of_what_a_profile_of_ours_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_QUICK_S", 60.0)
    held._malloc.cache_clear()
    if (first := started_profile()) is not None:
        stop_profile(first)  # which makes what all share
    before = held.held_bytes("cpu")
    profile = started_profile()
    if not before or profile is None:
        pytest.skip("no glibc that can be asked, or another profile runs")
    for _ in range(4000):
        torch.empty(256)
    with no_collections():
        assert len(stop_profile(profile) or ()) >= 8000
    assert abs(held.held_bytes("cpu") - before) < MIB  # of 16 MiB


@pytest.mark.parametrize(("takes_s", "asked"), [(0.0, 20), (0.01, 1)])
def test_malloc_is_asked_rarely_where_it_takes_long(takes_s: float, asked: int) -> None:
    calls: list[int] = []

    def ask() -> SimpleNamespace:
        ends = time.thread_time() + takes_s
        while time.thread_time() < ends:
            pass
        calls.append(1)
        return SimpleNamespace(uordblks=len(calls), hblkhd=0)

    malloc = held._Malloc(ask)
    found = [malloc.held_bytes(now_exactly=False) for _ in range(20)]
    assert len(calls) == asked
    assert found[-1] == asked
    assert malloc.held_bytes(now_exactly=True) == asked + 1
