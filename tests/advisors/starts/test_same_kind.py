"""Starts that treat alike storages alike, on nets of many equal steps made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memopt.advisors.advise import Adviser
from memopt.advisors.clock import OutOfTime
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.profiles.starts.same_kind import alike_plans
from memopt.estimators.simulator.decision import RECOMPUTE
from tests.support.layers_trace import Layer, build, chain


def problem_of(layers: Sequence[Layer], share: float) -> Problem:
    adviser = Adviser(build(layers), frozenset({"recompute"}))
    return adviser.problem(int(share * adviser.unplanned_peak_bytes), margin=0.0)


def two_kinds(steps: int) -> list[Layer]:
    """Each step makes a state of 10 bytes that cannot be made again, and of it 30 bytes that can."""
    layers: list[Layer] = []
    for step in range(steps):
        layers.append(Layer(10, 2.0, (2 * step - 2 if step else -1,), replayable=False))
        layers.append(Layer(30, 1.0, (2 * step,), op="aten.tanh.default"))
    return layers


def test_all_of_a_kind_and_then_no_more_than_it_takes() -> None:
    """Unplanned 21040 bytes; each that goes is worth 30."""
    problem = problem_of(two_kinds(500), 0.5)
    plans = [*alike_plans(problem)]
    assert problem.target_bytes == 10520
    assert [len(plan) for plan in plans] == [499, 374, 358, 354, 352]
    assert [problem.run(plan).peak_bytes for plan in plans] == [6070, 9820, 10300, 10420, 10480]


def test_of_replays_that_need_one_another_some_are_kept() -> None:
    """If all went, the first replay would make all of them again, and next to nothing of 6020 bytes would be gained."""
    problem = problem_of(chain([10] * 500), 0.3)
    plans = [*alike_plans(problem)]
    everything = dict.fromkeys(problem.candidates, RECOMPUTE)
    assert problem.run(everything).peak_bytes == 6010
    assert problem.target_bytes == 1806
    assert [len(plan) for plan in plans] == [467, 437, 422]
    assert [problem.run(plan).peak_bytes for plan in plans] == [1480, 1650, 1800]


def test_auto_has_its_first_plan_from_them() -> None:
    found = Auto(60.0).first_fitting(problem_of(two_kinds(500), 0.5))
    assert found is not None
    assert len(found) == 499


def test_a_judgement_ends_with_the_time() -> None:
    """Here when the third replay is looked for."""
    problem = problem_of(chain([10] * 500), 0.3)
    asked: list[int] = []

    def still_wanted() -> None:
        asked.append(len(asked))
        if len(asked) == 3:
            raise OutOfTime

    with pytest.raises(OutOfTime):
        problem.simulator.run(dict.fromkeys(problem.candidates, RECOMPUTE), still_wanted=still_wanted)
    assert asked == [0, 1, 2]
