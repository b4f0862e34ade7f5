"""What ops take while they run, and what others like them would."""

from __future__ import annotations

import msgspec
import pytest

from memopt.workspaces import ON_A_CPU, Calls, workspace_bytes, workspaces_of
from tests.support.toy_trace import toy_trace

KB = 1000


@pytest.mark.parametrize(
    ("taken", "gives", "found"),
    [
        ([0, 2000, 100, 1000], 0, [(700, 100), (1300, 0), (4000, 2000)]),
        ([0, 2000, 100, 2000], 1000, [(1700, 100), (2300, 0), (5000, 2000)]),
        ([10, 20, 30, 20], 0, None),
    ],
    ids=["of those that read as much the most", "which gives much", "little"],
)
def test_what_an_op_takes_to_what_it_touches(
    taken: list[int], gives: int, found: list[tuple[int, int]] | None
) -> None:
    """Calls of one op that read 1300, 4000, 700 and 4000 KB."""
    trace = toy_trace()
    ops = msgspec.structs.replace(
        trace.ops,
        name=[trace.ops.name[0]] * 4,
        workspace_bytes=[KB * each for each in taken],
        extra_bytes=[KB * (each + gives) for each in taken],
    )
    storages = msgspec.structs.replace(
        trace.storages, size_bytes=[KB * each for each in trace.storages.size_bytes]
    )
    calls = workspaces_of(msgspec.structs.replace(trace, ops=ops, storages=storages))
    expected = {} if found is None else {trace.op_name(0): [(KB * t, KB * took) for t, took in found]}
    assert calls == expected


CALLS: Calls = [(1000, 0), (4000, 2000), (5000, 500), (90_000, 900)]


@pytest.mark.parametrize(
    ("touched", "takes"),
    [
        (4010, 2000),
        (5000, 500),
        (6000, 3000),
        (1000, 0),
        (200, 0),
        (80_000, 800),
        (1_000_000, 10_000),
        (0, 0),
    ],
    ids=[
        "as one did",
        "as this one did, though a like one takes more",
        "as the like call that takes most",
        "none, as one did",
        "less than any: as the smallest",
        "as the like call",
        "more than any: as the largest",
        "nothing",
    ],
)
def test_what_a_call_of_another_size_takes(touched: int, takes: int) -> None:
    assert workspace_bytes(CALLS, touched) == takes


def test_a_call_of_no_bytes_in_a_plan_that_somebody_has_changed_ends_no_script() -> None:
    assert workspace_bytes([(0, 5)], 1000) == 5000


def test_what_kernels_take_before_a_profile_is_to_each_byte() -> None:
    assert workspace_bytes(ON_A_CPU["aten.convolution.default"], 7 << 20) == 7 << 20
