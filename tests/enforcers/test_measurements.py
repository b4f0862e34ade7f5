"""Which iterations of an enforced run are measured, and what a part of one counts."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch

from memopt.device import Device
from memopt.enforcers import measurements
from memopt.enforcers.guarding.what_is_there import UNNAMED
from memopt.instrument.frames import Frames
from memopt.plan import Plan
from memopt.profiler.known import There
from tests.support.toy_trace import toy_trace


class Meter:
    base_bytes = 10

    def __init__(self, peaks):
        self._peaks = peaks
        self.left_out = []

    without_gradients_bytes = 0

    def start(self, there=None):
        pass

    def without_gradients(self, begins):
        self.without_gradients_bytes = 50

    def leave_out(self, begins):
        self.left_out.append(begins)

    def stop(self):
        return self._peaks.pop(0)


@pytest.fixture
def measured(monkeypatch):
    """Measurements whose meter gives these peaks, one after the other."""

    def make(peaks):
        trace = toy_trace()
        plan = Plan(
            memopt="", created="", script=trace.script, device=Device(kind="cpu"), profile="", strategy="", budget_bytes=1, unplanned_peak_bytes=1,
            predicted_peak_bytes=1, plain_step_ms=1.0, predicted_step_ms=1.0, actions=[], script_actions=[], notes=[],
        )  # fmt: skip
        monkeypatch.setattr("memopt.instrument.memory.meter.meter_for", lambda kind: Meter(peaks))
        return measurements.Measurements(plan, peaks=True)

    return make


LOOP = SimpleNamespace(rounds=9, came_late=False)


def test_a_part_of_an_iteration_alone_is_no_peak(measured):
    found = measured([300])
    for count in (1, 2):
        found.iteration_ended(count, 1.0, None, plain=False)
        found.iteration_begins(count, LOOP)
    found.end(training=True)
    assert found.peak_bytes is None


@pytest.mark.parametrize(("training", "peak_bytes"), [(True, 900), (False, 300)])
def test_a_part_counts_beside_whole_iterations_if_it_trains(measured, training, peak_bytes):
    """What a script does when all steps are done is no part of one."""
    found = measured([300, 900])
    for count in range(1, measurements.MEASURED[1]):
        found.iteration_ended(count, 1.0, None, plain=False)
        found.iteration_begins(count, LOOP)
    found.end(training=training)
    assert found.peak_bytes == peak_bytes


@pytest.mark.parametrize("joins", [False, True])
def test_what_a_script_does_each_second_time_is_measured(measured, monkeypatch, joins):
    """A reinforcement learner's advantages, before the first of two batches: they save nothing, so that all iterations look alike."""
    found, turns = measured([300] * 9), []
    monkeypatch.setattr(found, "_start", lambda there=None: turns.append(count + 1))
    monkeypatch.setattr(found, "_stop", lambda: count in turns and not found._peaks.append((300, 10)))
    if joins:
        count = 3
        found.begin_after(count)
    for count in range(4 if joins else 1, 12):
        found.iteration_ended(count, 1.0, None, plain=False)
        found.iteration_begins(count, LOOP)
    assert {turn % 2 for turn in turns} == {0, 1}


def test_where_a_plan_joins_a_run_the_next_iteration_is_measured(measured):
    found = measured([300])
    found.begin_after(7)
    found.iteration_ended(8, 1.0, None, plain=False)
    found.iteration_begins(8, LOOP)
    found.end(training=True)
    assert found.peak_bytes == 300


def test_what_lives_is_not_looked_for_again_where_a_plan_joins_a_run(measured, monkeypatch):
    """It takes long, and was looked for while the script waited for the plan."""
    found, there = measured([300]), There([], [], [torch.zeros(3)], [])
    given = []
    monkeypatch.setattr(Meter, "start", lambda self, there=None: given.append(there))
    monkeypatch.setattr("memopt.profiler.known.there_now", lambda: pytest.fail("it looked again"))
    found.frames = Frames()
    found.begin_after(7, there)
    assert given == [(there.tensors, there.storages)]
    assert found._there == {UNNAMED: 12}


def test_the_iteration_that_was_profiled_is_measured_where_there_are_no_more(measured):
    for iteration in (1, 2):
        found = measured([700])
        found._plan = msgspec.structs.replace(found._plan, iteration=iteration)
        found.training_begins()
        for count in range(1, iteration + 1):
            found.iteration_ended(count, 1.0, None, plain=False)
            found.iteration_begins(count, LOOP)
        found.end(training=True)
        assert found.peak_bytes == 700


def test_a_measured_peak_unlike_the_predicted_one_is_told(measured):
    """Under an empty plan nobody counts what autograd saves."""
    found = measured([2, 2])
    for count in (1, 2, 3):
        found.iteration_ended(count, 1.0, None, plain=False)
        found.iteration_begins(count, LOOP)
    assert ["100% above the predicted one" in note for note in found.notes()] == [True]


def test_garbage_in_cycles_that_was_made_inside_a_measured_iteration_is_told(measured, monkeypatch):
    """torchsde's Brownian paths: the one of the step before is garbage only once the script has made another."""
    monkeypatch.setattr("memopt.enforcers.guarding.what_is_there.freed_by_collecting", lambda kind: 200)
    found = measured([300])
    found._plan = msgspec.structs.replace(found._plan, predicted_peak_bytes=100)
    for count in (1, 2, 3):
        found.iteration_ended(count, 1.0, None, plain=False)
        found.iteration_begins(count, LOOP)
    (note,) = found.notes()
    assert note.startswith("the measured peak is 200% above the predicted one: tensors in reference cycles,")


def test_steps_of_other_sizes_are_held_against_the_profiled_one_by_what_they_saved(measured):
    found = measured([])
    found._plan = msgspec.structs.replace(found._plan, saved_tensors=4, saved_elements=100)
    found.iteration_ended(1, 1000.0, (4, 100), plain=False)
    assert found.as_profiled_step_ms is None
    found.iteration_ended(2, 190.0, (4, 100), plain=False)
    assert (found.step_ms, found.as_profiled_step_ms) == (190.0, None)
    found = measured([])
    found._plan = msgspec.structs.replace(found._plan, saved_tensors=4, saved_elements=100)
    for count, elements in enumerate((50, 80, 200, 100, 100), 2):
        found.iteration_ended(count, 2.0 * elements + 10 * (elements == 50), (4, elements), plain=False)
    assert (found.step_ms, found.as_profiled_step_ms) == (200.0, 200.0)
    found.iteration_ended(7, 500.0, (9, 400), plain=False)
    found.iteration_ended(8, 600.0, (9, 400), plain=False)
    assert found.as_profiled_step_ms == 200.0
    assert found.step_ms == 200.0
    found.iteration_ended(9, 240.0, (4, 100), plain=False)
    assert (found.step_ms, found.as_profiled_step_ms) == (200.0, None), "three saved as many"


def test_what_was_held_outside_the_measured_iterations_is_told(measured, monkeypatch):
    megabytes = 1 << 20
    monkeypatch.setattr(measurements, "was_above_now_bytes", lambda kind: 300 * megabytes)
    found = measured([100 * megabytes] * 2)
    found.training_begins()
    for count in (1, 2, 3):
        found.iteration_ended(count, 1.0, None, plain=False)
        found.iteration_begins(count, LOOP)
    assert found.outside_bytes() == 300 * megabytes + Meter.base_bytes
    assert found.outside_bytes(whole_run_bytes=500 * megabytes) == 500 * megabytes
    from_the_first_iterations = measured([100 * megabytes] * 2)
    monkeypatch.setattr(measurements, "was_above_now_bytes", lambda kind: 0)
    from_the_first_iterations.training_begins()
    monkeypatch.setattr(measurements, "was_above_now_bytes", lambda kind: 300 * megabytes)
    for count in (1, 2, 3):
        from_the_first_iterations.iteration_ended(count, 1.0, None, plain=False)
        from_the_first_iterations.iteration_begins(count, LOOP)
    assert from_the_first_iterations.outside_bytes() == 0, "what training's own pieces came to"
    after_a_recording = measured([100 * megabytes] * 2)
    after_a_recording.begin_after(3)
    after_a_recording.iteration_ended(4, 1.0, None, plain=False)
    assert after_a_recording.outside_bytes() == 0, "memopt's own memory"
    monkeypatch.setattr(measurements, "was_above_now_bytes", lambda kind: 50 * megabytes)
    small = measured([100 * megabytes] * 2)
    small.training_begins()
    for count in (1, 2, 3):
        small.iteration_ended(count, 1.0, None, plain=False)
        small.iteration_begins(count, LOOP)
    assert small.outside_bytes(whole_run_bytes=101 * megabytes) == 0


def test_an_evaluation_inside_an_iteration_is_told_apart(measured, monkeypatch):
    """It is no part of the peak that the plan foretold, unless the profiled iteration called modules without gradients as well, and came to
    about as much: a teacher's calls."""
    monkeypatch.setattr(measurements.Measurements, "_outside_all_calls", lambda self, whole: 0)
    for foretold, teaches, peak, outside in (
        (1, True, 30, 50),
        (50, True, 50, 0),
        (49, False, 30, 50),
        (50, False, 30, 0),
    ):
        found = measured([30])
        found._plan = msgspec.structs.replace(
            found._plan, predicted_peak_bytes=foretold, without_gradients=teaches
        )
        found.begin_after(7)
        found.without_gradients(True, "evaluation")
        found.without_gradients(False, "")
        found.iteration_ended(8, 1.0, None, plain=False)
        assert (found.peak_bytes, found.outside_bytes()) == (peak, outside)
        assert any("an evaluation" in note for note in found.notes()) == (outside > 0)


def test_what_is_held_while_the_script_looks_at_state_is_left_out(measured):
    """Each look and each step tells of it: the meter hears of the first look, and of the end."""
    found = measured([30, 30])
    found.begin_after(7)
    for is_back in (False, True, True, False, False):
        found.state_is_back(is_back)
    assert found._meter.left_out == [True, False]


def test_no_iteration_is_measured_that_begins_with_all_state(measured):
    found = measured([30] * 9)
    found.state_is_back(True)
    assert measured_of(found, 6) == []
    found.state_is_back(False)
    assert measured_of(found, 6) == [3, 6]


def note_after(measured, peak, saved, *, planned_elements):
    """The only one, where an iteration of a plan that predicted 200 bytes has saved these (tensors, elements), not 2 and as many as planned."""
    found = measured([peak])
    found._plan = msgspec.structs.replace(
        found._plan, saved_tensors=2, saved_elements=planned_elements, predicted_peak_bytes=200
    )
    found.begin_after(7)
    found.iteration_ended(8, 1.0, saved, plain=False)
    (note,) = found.notes()
    return note


def test_a_peak_that_grows_with_tensors_that_the_plan_does_not_know_is_told(measured):
    """Layers are trained that were not: what they save stays, and the plan has taken away most of the rest."""
    note = note_after(measured, 1200, (4, 1500), planned_elements=1000)
    assert "the peak moves with them" in note
    assert "layers that the profiled iteration did not train, or a loop over a longer sequence" in note


def test_a_peak_that_grows_with_nothing_that_is_saved_is_told(measured):
    """A packed batch with more tokens and smaller attention: backward's buffer of logits has grown."""
    note = note_after(measured, 300, (2, 97), planned_elements=100)
    assert "one of 0.97 times as many, and is 1.50 times the predicted one: what grew most there" in note


def test_an_iteration_that_saved_far_less_did_other_things(measured):
    """A grid search goes over to a smaller net: nothing of the profiled iteration has grown."""
    note = note_after(measured, 300, (2, 40), planned_elements=100)
    assert "is 1.50 times the predicted one: it ran other ops or calls than the profiled one" in note


def outcomes_of(measured, *elements):
    """Measurements of a plan for 2 tensors of 1,000 elements, after iterations that saved so many."""
    found = measured([1] * len(elements))
    found._plan = msgspec.structs.replace(found._plan, saved_tensors=2, saved_elements=1000)
    found.begin_after(7)
    for count, saved in enumerate(elements, 8):
        found.iteration_ended(count, 1.0, (2, saved), plain=False)
    return found


@pytest.mark.parametrize(
    ("elements", "planned", "larger"), [(1000, 7, 0), (760, 7, 0), (740, 0, 0), (1500, 0, 7)]
)
def test_an_iteration_that_saves_little_is_none_that_a_larger_plan_is_for(
    measured, elements, planned, larger
):
    """A linear evaluation after the pretraining passed the budget without anything saved, and each next run planned for twice as much."""
    found = measured([7])
    found._plan = msgspec.structs.replace(found._plan, saved_tensors=2, saved_elements=1000)
    found.begin_after(7)
    found.iteration_ended(8, 1.0, (2, elements), plain=False)
    assert (found.peak_bytes, found.peaks) == (7, measurements.Peaks(planned, larger))


def test_hardly_any_more_elements_are_no_other_iteration(measured):
    """A spline's mask selects some more of a batch each time: what a step costs is told all the same."""
    found = outcomes_of(measured, 1003, 998, 1000)
    assert (found.other_steps, found.notes()) == (0, [])


@pytest.mark.parametrize(("predicted", "told"), [(1000, False), (500, True)])
def test_another_tensor_of_no_size_is_told_where_the_peak_is_another(measured, predicted, told):
    """A figure that is computed with gradients now and then."""
    found = outcomes_of(measured, 1000)
    found._plan = msgspec.structs.replace(found._plan, predicted_peak_bytes=predicted)
    found._peaks[:] = [(1000, 0)]
    found.iteration_ended(9, 1.0, (3, 1001), plain=False)
    assert found.other_steps == 1
    assert bool(found.notes()) == told


def test_how_many_times_as_many_elements_is_told_once(measured):
    (note,) = outcomes_of(measured, 780, 781, 1003).notes()
    assert note.startswith(
        "2 iterations saved other tensors than the profiled one, 0.78 times as many elements;"
    )


@pytest.mark.parametrize(("began_with", "buffers"), [(1_000, True), (30_000_000, False)])
def test_what_a_script_has_kept_since_is_no_buffer_of_an_op(measured, began_with, buffers):
    """Deep copies of a model, or what a round of a search leaves in reference cycles."""
    found = outcomes_of(measured, 1000, 780)
    found._plan = msgspec.structs.replace(found._plan, predicted_peak_bytes=10_000_000, base_bytes=1_000)
    found._peaks[:] = [(40_000_000, began_with)]
    told = "; ".join(found.notes())
    assert ("buffers of backward's or of an op's, whose size follows the data" in told) is buffers
    assert ("a measured iteration began with 28.6 MiB more than the profiled one" in told) is not buffers


def test_a_peak_as_without_the_plan_is_not_told_as_one_that_follows_the_data(measured):
    """The evaluations of L-BFGS's line search are called from another line than the one that was recorded."""
    found = outcomes_of(measured, 1000, 1010)
    for unplanned, why in (
        (40_100_000, "as much as without the plan"),
        (90_000_000, "whose size follows the data"),
    ):
        found._plan = msgspec.structs.replace(
            found._plan, predicted_peak_bytes=10_000_000, unplanned_peak_bytes=unplanned, base_bytes=1_000
        )
        found._peaks[:] = [(40_000_000, 1_000)]
        assert why in "; ".join(found.notes())


def test_that_the_largest_iterations_were_not_measured_is_told(measured):
    """Sentences of all lengths: 98.8 MiB was told, and the longest came to 109."""
    found = outcomes_of(measured, 1200, 900)
    told = "saved other tensors than the profiled one, 0.90 to 1.20 times as many elements"
    assert f"{told}; " in found.notes()[0]
    found.iteration_ended(10, 1.0, (2, 1300), plain=False)
    assert "0.90 to 1.30 times as many elements (none above 1.20 was measured); " in found.notes()[0]


def measured_of(found, iterations, guarded_from=1000, other_from=1000, takes_s=1.0):
    """Which of so many iterations `found` measures, where that takes `takes_s` seconds; the guard beside the plan holds those from `guarded_from` on,
    those from `other_from` on save a tensor less than planned."""
    found._plan = msgspec.structs.replace(found._plan, saved_tensors=2, saved_elements=1000)
    begun = []
    start = found._start
    found._start = lambda there=None: (begun.append(count + 1), start())
    for count in range(1, iterations):
        found._takes_s = takes_s if begun else 0.0
        found.iteration_ended(count, 1.0, (2 - (count >= other_from), 1000), plain=False)
        found.iteration_begins(count, LOOP, guarded=count + 1 >= guarded_from)
    return begun


def test_what_changes_slowly_is_measured_later(measured):
    assert measured_of(measured([1] * 9), 70) == [3, 6, 17, 33, 65]


def test_what_a_script_does_each_fourth_time_is_measured_where_that_takes_no_time(measured):
    """The factors of a preconditioner, which autograd saves nothing for, came to 37.4 MiB of the 26 that were told."""
    turns = measured_of(measured([1] * 20), 50, takes_s=0.1)
    assert turns == [3, 6, 8, 10, 13, 17, 25, 33, 49]
    assert {turn % 4 for turn in turns} == {0, 1, 2, 3}


@pytest.mark.parametrize("turn", range(4))
def test_what_saves_more_at_intervals_is_measured(measured, turn):
    """A penalty in each fourth iteration came to 92 MiB of the 63 that were told: every turn but its own was among those that are measured."""
    found, begun = measured([1] * 30), []
    found._plan = msgspec.structs.replace(found._plan, saved_tensors=2, saved_elements=1000)
    found.begin_after(4)
    begun = [5]
    start = found._start
    found._start = lambda there=None: (begun.append(count + 1), start())
    for count in range(5, 40):
        more = count % 4 == turn
        found.iteration_ended(count, 1.0, (2 + more, 1000 + 500 * more), plain=False)
        found.iteration_begins(count, LOOP)
    assert [each for each in begun if each % 4 == turn and each < 20]
    assert found.larger_at == next(each for each in range(5, 9) if each % 4 == turn)


def test_what_saves_more_now_and_then_is_not_awaited_for_ever(measured):
    found = measured([1] * 99)
    found._plan = msgspec.structs.replace(found._plan, saved_tensors=2, saved_elements=1000)
    at = {21, 22}
    begun = []
    start = found._start
    found._start = lambda there=None: (begun.append(count + 1), start())
    for count in range(20, 120):
        found._takes_s, found._measured_planned = 1.0, True
        found.iteration_ended(count, 1.0, (2, 1500 if count in at else 1000), plain=False)
        found.iteration_begins(count, LOOP)
    assert len(begun) <= measurements._MOST_AWAITED + 6


def test_of_iterations_that_the_guard_holds_some_are_measured_and_no_two_in_a_row(measured):
    """A script that keeps something from iteration 20 on was told to be held, by what the first ones came to."""
    assert measured_of(measured([1] * 9), 33, guarded_from=22) == [3, 6, 17, 22, 25, 29, 33]


def test_of_iterations_that_save_other_tensors_some_are_measured(measured):
    """Those of an adjoint method save nothing that is watched, and came to 10.4 MiB of the 7.8 that were told."""
    assert measured_of(measured([1] * 9), 33, other_from=21) == [3, 6, 17, 22, 25, 29, 33]


@pytest.mark.parametrize("turn", range(3))
def test_what_a_script_does_each_third_time_is_measured(measured, turn):
    """Gradients of each sample, which autograd saves nothing for, came to 82.7 MiB of the 51.2 that were told."""
    found, begun = measured([1] * 20), set()
    found._plan = msgspec.structs.replace(found._plan, saved_tensors=2, saved_elements=1000)
    start = found._start
    found._start = lambda there=None: (begun.add((count + 1) % 3), start())
    for count in range(1, 18):
        found.iteration_ended(count, 1.0, (2, 1000 if count % 3 == turn else 0), plain=False)
        found.iteration_begins(count, LOOP)
    assert begun == {0, 1, 2}
