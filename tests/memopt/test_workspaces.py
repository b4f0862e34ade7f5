"""What ops take while they run, to what they read and give."""

from __future__ import annotations

import msgspec
import pytest

from memopt.workspaces import workspaces_of
from tests.support.toy_trace import toy_trace

KB = 1000


@pytest.mark.parametrize(
    ("taken", "gives", "share"),
    [
        ([0, 2000, 100, 2000], 0, 0.5),
        ([0, 2000, 100, 2000], 1000, 0.4),
        ([0, 0, 200, 0], 0, None),
        ([0, 200, 500, 200], 0, 0.5),
        ([10, 20, 30, 20], 0, None),
    ],
    ids=[
        "of the largest",
        "which reads little and gives much",
        "most of the larger calls take none",
        "no more than four times the most",
        "little",
    ],
)
def test_what_an_op_takes_to_what_it_touches(taken: list[int], gives: int, share: float | None) -> None:
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
    found = workspaces_of(msgspec.structs.replace(trace, ops=ops, storages=storages))
    assert found == ({} if share is None else {trace.op_name(0): share})
