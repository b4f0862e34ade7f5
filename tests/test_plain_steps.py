"""The time of a plain step: the median of what is quickly had, a GAN's iterations counted from when both optimizers step."""

from __future__ import annotations

from memopt.profiler.plain_steps import PlainSteps


def test_the_first_is_left_out_where_there_are_others() -> None:
    steps = PlainSteps()
    assert steps.median_ms is None
    steps.add(90.0, waited_for=False)
    assert steps.median_ms == 90.0
    for time_ms in (10.0, 14.0, 12.0):
        steps.add(time_ms, waited_for=True)
    assert steps.median_ms == 12.0


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
    assert steps.median_ms is None
    assert steps.number(3, rounds=2) == 2
