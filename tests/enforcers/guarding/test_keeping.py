"""What a script keeps from one iteration to the next, as the allocators tell of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from memopt.enforcers.guarding import keeping as module
from memopt.enforcers.guarding.keeping import Held, Keeping

ROOM = 100


@dataclass
class Process:
    """What it has."""

    tensors: int = 1000
    garbage: int = 0
    beside: int = 4000
    looks: int = 0
    stale: int = 0
    """What has gone, of which malloc's last answer does not know."""
    collections: int = 0

    def look(self) -> int:
        self.looks += 1
        return self.tensors + self.garbage

    def collect(self) -> None:
        self.collections += 1
        self.garbage = 0


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    there = Process()

    def held_bytes(device: str, *, now_exactly: bool) -> int:
        return there.tensors + there.garbage + there.beside + (0 if now_exactly else there.stale)

    monkeypatch.setattr(module, "held_bytes", held_bytes)
    monkeypatch.setattr(module.gc, "collect", there.collect)
    return there


@pytest.fixture
def held(process: Process) -> Held:
    return Held("cpu", process.look)


def test_what_is_kept_is_told_with_as_much_again_once_there_is_no_room_for_it(
    process: Process, held: Held
) -> None:
    keeping = Keeping(held)
    for _ in range(3):
        assert keeping.more_bytes(ROOM) == 0
        process.tensors += 20
    assert keeping.more_bytes(70) == 60 + 20


def test_what_malloc_gives_out_for_something_else_is_not_told(process: Process, held: Held) -> None:
    keeping = Keeping(held)
    assert keeping.more_bytes(ROOM) == 0
    process.beside += 4000
    assert keeping.more_bytes(ROOM) == 0
    process.tensors += 50
    assert keeping.more_bytes(ROOM) == 0
    assert process.looks == 2, "not looked at again"
    assert not process.collections, "nothing of it was tensors"
    process.tensors += 100
    assert keeping.more_bytes(ROOM) == 150 + 100


def test_what_has_just_gone_is_no_reason_to_look(process: Process, held: Held) -> None:
    """Gradients are cleared between the two moments, and malloc is asked rarely where that takes long."""
    keeping = Keeping(held)
    assert keeping.more_bytes(ROOM) == 0
    process.stale = 500
    assert keeping.more_bytes(ROOM) == 0
    assert process.looks == 1
    process.tensors += 150
    assert keeping.more_bytes(ROOM) == 300


def test_what_was_seen_at_one_moment_is_known_at_another(process: Process, held: Held) -> None:
    at_end, at_first = Keeping(held), Keeping(held)
    assert [at_end.more_bytes(ROOM), at_first.more_bytes(ROOM)] == [0, 0]
    assert process.looks == 2, "each has tensors of its own at first"
    process.beside += 4000
    assert [at_end.more_bytes(ROOM), at_first.more_bytes(ROOM)] == [0, 0]
    assert process.looks == 3


def test_garbage_is_collected_as_long_as_that_helps(process: Process, held: Held) -> None:
    keeping = Keeping(held)
    assert keeping.more_bytes(ROOM) == 0
    process.garbage += 200
    assert keeping.more_bytes(ROOM) == 0
    assert process.collections == 1
    process.tensors += 200
    assert keeping.more_bytes(ROOM) == 200, "as much had been given out before"
    assert process.collections == 2
    process.tensors += 200
    assert keeping.more_bytes(ROOM) == 400 + 200
    assert process.collections == 2, "it did not help"


def test_it_looks_once_where_what_is_held_goes_up_and_down(process: Process, held: Held) -> None:
    """Batches of many lengths, in a script with a million objects: a look took half a second in each iteration."""
    keeping = Keeping(held)
    for beside in (4000, 4200, 4000, 4200, 4050, 4190):
        process.beside = beside
        assert keeping.more_bytes(ROOM) == 0
    assert process.looks == 2
