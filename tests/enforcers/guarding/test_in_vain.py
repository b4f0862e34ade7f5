"""A guard that has nothing to move sleeps, for longer each time, and wakes for an iteration that saves more."""

from __future__ import annotations

from memopt.enforcers.guarding import in_vain
from memopt.enforcers.guarding.in_vain import InVain


def watched(found: InVain, iterations: range, *, moved: bool = False, passed: bool = True, saved: int = 100) -> None:  # fmt: skip
    for each in iterations:
        found.watched(each, saved, moved=moved, passed=passed)


def test_it_sleeps_after_some_in_a_row_and_longer_each_time() -> None:
    """A translation model took three times as long for no byte."""
    found = InVain()
    watched(found, range(in_vain._IN_VAIN - 1))
    assert not found.is_over(in_vain._IN_VAIN - 1)
    watched(found, range(3, 4))
    until = 4 + in_vain._SLEEPS
    assert [each for each in range(4, 100) if found.is_over(each, 100)] == [*range(4, until)]
    watched(found, range(until, until + 1))
    longer = until + 1 + 2 * in_vain._SLEEPS
    assert [each for each in range(until + 1, 200) if found.is_over(each)] == [*range(until + 1, longer)]


def test_an_iteration_that_saves_more_is_watched() -> None:
    found = InVain()
    watched(found, range(4))
    assert found.is_over(5, 100)
    assert not found.is_over(5, 150)


def test_what_holds_the_budget_or_moves_something_is_not_in_vain() -> None:
    found = InVain()
    watched(found, range(9), passed=False)
    watched(found, range(3))
    watched(found, range(3, 9), moved=True)
    assert not found.is_over(9)
    watched(found, range(4))
    found.watched(4, 100, moved=True, passed=True)
    assert not found.is_over(5), "what it moves now it could not before"
