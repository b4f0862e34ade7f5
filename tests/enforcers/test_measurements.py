"""Which iterations of an enforced run are measured, and what a part of one counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memopt.device import Device
from memopt.enforcers import measurements
from memopt.plan import Plan
from tests.support.toy_trace import toy_trace


class Meter:
    base_bytes = 10

    def __init__(self, peaks):
        self._peaks = peaks

    def start(self):
        pass

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
    found.end()
    assert found.peak_bytes is None


def test_a_part_counts_beside_whole_iterations(measured):
    found = measured([300, 900])
    for count in (1, 2, 3, 4):
        found.iteration_ended(count, 1.0, None, plain=False)
        found.iteration_begins(count, LOOP)
    found.end()
    assert found.peak_bytes == 900


def test_where_a_plan_joins_a_run_the_next_iteration_is_measured(measured):
    found = measured([300])
    found.begin_after(7)
    found.iteration_ended(8, 1.0, None, plain=False)
    found.iteration_begins(8, LOOP)
    found.end()
    assert found.peak_bytes == 300
