"""Memory snapshots: read without running code, hostile ones refused by name, and replayed exactly from their own start."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import BadFile, UsageError
from memopt.estimators.allocator.caching import CachingAllocator
from memopt.estimators.allocator.trace import load_allocator_trace, replay_trace
from memopt.estimators.snapshot.plain_pickle import load_plain
from memopt.estimators.snapshot.read import ACTIONS, read_snapshot
from memopt.estimators.snapshot.start import allocator_trace

DATA = Path(__file__).parent.parent / "data" / "allocator_traces"
MIB = 1 << 20

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False), st.text(max_size=300)
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=5), inner, max_size=5),
    ),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(value=PLAIN, protocol=st.integers(2, 5))
def test_plain_data_comes_back_whole(value: object, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol), "x") == value


def test_many_values_and_shared_ones() -> None:
    shared = {"a": list(range(1000))}
    value = [shared, shared, *({"k": i, "s": str(i)} for i in range(3000)), b"bytes" * 100, 2**63, -1]
    for protocol in (3, 4, 5):
        back = load_plain(pickle.dumps(value, protocol), "x")
        assert back == value
        assert isinstance(back, list)
        assert back[0] is back[1]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_plain(data: bytes) -> None:
    try:
        value = load_plain(data, "x")
    except BadFile:
        return
    assert type(value) in (type(None), bool, int, float, str, bytes, tuple, list, dict)


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 10**6), protocol=st.integers(2, 5))
def test_truncated_pickles_are_refused(cut: int, protocol: int) -> None:
    data = pickle.dumps(
        {"segments": [1.5, "x" * 300, (1, 2)], "device_traces": [[{"size": 2**40}]]}, protocol
    )
    with pytest.raises(BadFile):
        load_plain(data[: cut % len(data)], "x")


class Evil:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, object]:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "system"), (eval, "eval"), (os.unlink, "unlink"), (bytearray, "bytearray")],
)
def test_code_is_refused_by_name_and_does_not_run(
    tmp_path: Path, protocol: int, function: object, name: str
) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [Evil(function, f"touch {marker}")]}, protocol))
    with pytest.raises(BadFile) as caught:
        read_snapshot(path)
    if protocol >= 1:
        assert name in caught.value.why
        assert "holds code" in caught.value.what
    assert not marker.exists()


@pytest.mark.parametrize(
    ("data", "opcode"),
    [
        (b"\x80\x02cos\nsystem\n.", "GLOBAL"),
        (b"\x80\x02(ios\nsystem\n.", "INST"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "STACK_GLOBAL"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02K\x01Q.", "BINPERSID"),
        (b"\x80\x02Pabc\n.", "PERSID"),
        (b"\x80\x02}}b.", "BUILD"),
        (b"\x80\x02K\x01)R.", "REDUCE"),
        (b"\x80\x02K\x01)\x81.", "NEWOBJ"),
        (b"\x80\x02c\x1b[31mos\x1b\nsys\x00tem\n.", "\\x1b[31mos\\x1b.sys\\x00tem"),
    ],
)
def test_each_opcode_that_could_run_code_is_named(data: bytes, opcode: str) -> None:
    with pytest.raises(BadFile) as caught:
        load_plain(data, "snapshot.pickle")
    assert opcode in caught.value.why
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04K\x01K\x02.",
        b"\x80\x04j\xff\xff\xff\xff.",
        b"\x80\x04X\xff\xff\xff\x7fabc.",
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x8b" + struct.pack("<I", 100_000) + b"\x01" * 100_000 + b".",
        b"\x80\x04}(K\x01u.",
        b"\x80\x04}(]K\x01u.",
        b"\x80\x04K\x01K\x02a.",
        b"\x80\x04)" + b"\x85" * 200_000 + b"}q\x00\x30h\x00.",
        b"\x80\x04((.",
        b"(t",
        b"garbage",
        b"PK\x03\x04zip",
    ],
)
def test_broken_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(BadFile):
        load_plain(data, "x")


def test_a_huge_memo_index_takes_no_memory() -> None:
    assert load_plain(b"\x80\x04K\x07r\xff\xff\xff\xff.", "x") == 7


def test_a_nested_tuple_as_key_is_refused() -> None:
    with pytest.raises(BadFile):
        load_plain(b"\x80\x04})" + b"\x85" * 200_000 + b"K\x01s.", "x")


def snapshot_of(tmp_path: Path, name: str, *, since: int = 0) -> Path:
    """A snapshot file with the events of a recorded trace after `since`, and the segments at its end."""
    trace = load_allocator_trace(DATA / f"{name}.json.gz")
    allocator = CachingAllocator(
        place=lambda size: next(a for act, a, s, _ in trace.events if act == "segment_alloc")
    )
    for address, size, pool, stream, live in trace.init:
        allocator.adopt_segment(
            address, size, small=pool == 0, stream=stream, live=[(a, a, b) for a, b in live]
        )
    for action, address, size, stream in trace.events:
        if action == "alloc":
            allocator.malloc(address, size, stream)
        elif action == "free_completed":
            allocator.free(address)
    frames = [{"filename": "train.py", "line": 3, "name": "step"}]
    data = {
        "segments": [segment_row(allocator, address, size) for address, size in allocator.segments.items()],
        "device_traces": [
            [],
            [
                {"action": act, "addr": a, "size": s, "stream": x, "time_us": 5, "frames": frames}
                for act, a, s, x in trace.events[since:]
            ],
        ],
        "allocator_settings": {"expandable_segments": False, "max_split_size": -1, "nested": [1]},
    }
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(gzip.compress(pickle.dumps(data), 1))
    return path


def segment_row(allocator: CachingAllocator, address: int, size: int) -> dict[str, object]:
    inside = sorted(
        (b for b in allocator.blocks() if address <= b.address < address + size), key=lambda b: b.address
    )
    blocks = [
        {
            "address": b.address,
            "size": b.size_bytes,
            "requested_size": b.requested_bytes or b.size_bytes,
            "state": "active_allocated" if b.allocated else "inactive",
        }
        for b in inside
    ]
    kind = "small" if inside[0].pool.small else "large"
    return {
        "device": 1, "address": address, "total_size": size, "segment_type": kind, "stream": 0,
        "is_expandable": False, "segment_pool_id": (0, 0), "blocks": blocks,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["medium_512_inference", "bcrafton_h0c0e8a7", "medium_512_training"])
@pytest.mark.parametrize("since", [0, 1500])
def test_a_snapshot_replays_exactly_from_its_own_start(tmp_path: Path, name: str, since: int) -> None:
    snapshot = read_snapshot(snapshot_of(tmp_path, name, since=since))
    (device,) = snapshot.devices
    assert device.index == 1
    recorded = load_allocator_trace(DATA / f"{name}.json.gz")
    assert len(device) == len(recorded.events) - since
    assert (device.allocated_bytes, device.reserved_bytes) == (recorded.end_allocated, recorded.end_reserved)
    trace = allocator_trace(device)
    result = replay_trace(trace)
    assert result.end_reserved_bytes == recorded.end_reserved
    assert result.same_reserved == result.events > 0
    assert result.same_address == result.allocations
    if since == 0:
        assert sum(size for _, size, *_ in trace.init) == sum(size for _, size, *_ in recorded.init)


def test_what_a_snapshot_says(tmp_path: Path) -> None:
    snapshot = read_snapshot(snapshot_of(tmp_path, "medium_512_inference"))
    (device,) = snapshot.devices
    assert snapshot.stacks == ("", "train.py:3 step")
    assert set(device.stack.tolist()) == {1}
    assert set(device.time_us.tolist()) == {5}
    assert {ACTIONS[index] for index in device.action.tolist()} == {"alloc", "free_completed"}
    assert snapshot.settings["expandable_segments"] == "False"
    assert snapshot.settings["nested"] == ""
    assert not device.expandable


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([1], "not a table"),
        ({}, "neither"),
        ({"segments": 3}, "not a list"),
        ({"segments": [{"address": 1}]}, "total_size"),
        ({"segments": [{"address": -1, "total_size": 5}]}, "address"),
        ({"segments": [{"address": 2**70, "total_size": 5}]}, "address"),
        ({"segments": [{"address": 0, "total_size": 9}, {"address": 4, "total_size": 9}]}, "overlap"),
        ({"segments": [{"address": 0, "total_size": 9, "blocks": [{"size": 10}]}]}, "beyond"),
        ({"segments": [{"address": 0, "total_size": 9, "blocks": [{"size": 0}]}]}, "overlap"),
        ({"segments": [{"device": 10**9, "address": 0, "total_size": 9}]}, "devices"),
        ({"device_traces": [[]] * 100}, "devices"),
        ({"device_traces": [[{"action": "alloc", "addr": "x"}]]}, "addr"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "size": True}]]}, "size"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "frames": {}}]]}, "frames"),
        ({"device_traces": [{}]}, "not a list"),
    ],
)
def test_senseless_snapshots_are_refused(tmp_path: Path, value: object, why: str) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(BadFile) as caught:
        read_snapshot(path)
    assert why in caught.value.why
    assert caught.value.exit_code == 1


def test_endless_text_is_not_read(tmp_path: Path) -> None:
    bomb: list[object] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    value = {
        "device_traces": [
            [{"action": bomb, "frames": [{"filename": bomb, "line": bomb, "name": "x" * 10**6}]}]
        ]
    }
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    snapshot = read_snapshot(path)
    assert len(snapshot.stacks[1]) < 600


def test_events_that_contradict_the_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(
        pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 512, "size": 99}]], "segments": []})
    )
    with pytest.raises(BadFile):
        allocator_trace(read_snapshot(path).devices[0])


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_snapshot(tmp_path / "nothing.pickle")
