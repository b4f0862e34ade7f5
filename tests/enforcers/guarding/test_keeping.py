"""What a script keeps from one iteration to the next, as the allocators tell of it."""

from __future__ import annotations

from memopt.enforcers.guarding.keeping import Keeping


def test_what_is_kept_is_told_with_as_much_again_once_there_is_no_room_for_it() -> None:
    tensors = iter([1000, 1060])
    keeping = Keeping(lambda: next(tensors))
    assert [keeping.more_bytes(5000 + kept, 100) for kept in (0, 20, 40)] == [0, 0, 0]
    assert keeping.more_bytes(5060, 70) == 60 + 20


def test_what_malloc_gives_out_for_something_else_is_not_told() -> None:
    tensors = iter([1000, 1000, 1150])
    keeping = Keeping(lambda: next(tensors))
    assert keeping.more_bytes(5000, 100) == 0
    assert keeping.more_bytes(9000, 100) == 0
    assert keeping.more_bytes(9050, 100) == 0, "not looked at again"
    assert keeping.more_bytes(9150, 100) == 150 + 100
