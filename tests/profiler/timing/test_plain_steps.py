"""The time of a plain step: the median of what is quickly had, a GAN's iterations counted from when both optimizers step."""

from __future__ import annotations

import pytest

from memopt.profiler.timing.plain_steps import PlainSteps
from memopt.trace import Watching


def test_the_first_is_left_out_where_there_are_others() -> None:
    steps = PlainSteps()
    assert steps.step_ms(0.0) == 0.0
    steps.add(90.0, waited_for=False)
    assert steps.step_ms(0.0) == 90.0
    for time_ms in (10.0, 14.0, 12.0):
        steps.add(time_ms, waited_for=True)
    assert steps.step_ms(0.0) == 12.0
    assert steps.step_ms(40.0) == 12.0


def test_a_step_takes_no_longer_than_the_one_that_was_slowed_down_by_recording() -> None:
    steps = PlainSteps()
    assert steps.step_ms(250.0) == 250.0
    steps.add(7356.0, waited_for=False)  # an evaluation lies in it
    assert steps.step_ms(250.0) == 250.0


def test_short_steps_are_timed_six_times_and_long_ones_for_two_seconds() -> None:
    short, long, endless = PlainSteps(), PlainSteps(), PlainSteps()
    for _ in range(6):
        assert not short.enough
        short.add(10.0, waited_for=True)
    assert short.enough
    long.add(900.0, waited_for=False)
    for _ in range(2):
        assert not long.enough
        long.add(900.0, waited_for=True)
    assert long.enough
    endless.add(2001.0, waited_for=False)
    assert endless.enough


def test_iterations_before_the_last_optimizer_has_joined_are_parts_of_one() -> None:
    steps = PlainSteps()
    assert steps.number(1, rounds=1) == 1
    steps.add(5.0, waited_for=False)
    assert steps.number(2, rounds=1) == 1, "another optimizer has taken its place"
    assert steps.step_ms(0.0) == 0.0
    assert steps.number(3, rounds=2) == 2


def test_watching_is_told_from_plain_neighbours() -> None:
    steps = PlainSteps()
    steps.add(90.0, waited_for=True)
    assert not steps.worth_watching, "the first is slow"
    for plain, watched in ((10.0, 15.0), (12.0, 16.0), (10.0, 18.0)):
        steps.add(plain, waited_for=True)
        assert steps.worth_watching
        steps.add_watched(watched)
    assert steps.watching(200, 100) is None, "the last has no plain one after it"
    steps.add(14.0, waited_for=True)
    assert steps.watching(200, 100) == Watching(200, 100, 5.0, pytest.approx(1.2533 * 1.4826 / 3**0.5))


def test_long_steps_are_not_watched() -> None:
    steps = PlainSteps()
    assert not steps.worth_watching
    for milliseconds, worth in ((350.0, False), (350.0, False), (330.0, True)):
        steps.add(milliseconds, waited_for=True)
        assert steps.worth_watching is worth
