"""What a script keeps from one iteration to the next, as the allocators tell of it."""

from __future__ import annotations

import pytest

from memopt.enforcers.guarding import keeping as module
from memopt.enforcers.guarding.keeping import Keeping


def keeping_of(held: list[int], tensors: list[int], monkeypatch: pytest.MonkeyPatch) -> Keeping:
    """What the allocators tell, each time that they are asked, and what there is of tensors, each time that they are looked for."""
    told, found = iter(held), iter(tensors)
    monkeypatch.setattr(module, "held_bytes", lambda device: next(told))
    return Keeping("cpu", lambda: next(found))


def test_what_is_kept_is_told_with_as_much_again_once_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    keeping = keeping_of([5000, 5020, 5040, 5060, 5060], [1000, 1060], monkeypatch)
    assert [keeping.more_bytes(100) for _ in range(3)] == [0, 0, 0]
    assert keeping.more_bytes(70) == 60 + 20


def test_what_malloc_gives_out_for_something_else_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = keeping_of([5000, 9000, 9000, 9050, 9150, 9150], [1000, 1000, 1150], monkeypatch)
    assert keeping.more_bytes(100) == 0
    assert keeping.more_bytes(100) == 0
    assert keeping.more_bytes(100) == 0, "not looked at again"
    assert keeping.more_bytes(100) == 150 + 100


def test_garbage_is_collected_as_long_as_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(module.gc, "collect", lambda: collected.append(0))
    keeping = keeping_of([5000, 5200, 5000, 5040, 5200, 5200, 5400], [1000, 1000, 1200, 1400], monkeypatch)
    assert [keeping.more_bytes(100) for _ in range(3)] == [0, 0, 0]
    assert len(collected) == 1
    assert keeping.more_bytes(100) == 200, "as much had been given out before"
    assert len(collected) == 2
    assert keeping.more_bytes(100) == 400 + 200
    assert len(collected) == 2, "it did not help"


def test_it_looks_once_where_what_is_held_goes_up_and_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of many lengths, in a script with a million objects: a look took half a second in each iteration."""
    keeping = keeping_of([5000, 5200, 5200, 5000, 5200, 5050, 5190], [1000, 1000], monkeypatch)
    assert [keeping.more_bytes(100) for _ in range(6)] == [0] * 6
