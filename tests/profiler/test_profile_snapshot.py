"""Profiles made from memory snapshots: bytes against the recorded ones, words against the stacks, hostile files refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from memopt.cli.main import run
from memopt.errors import BadFile, NotPossibleHere
from memopt.estimators.allocator.replay import replay
from memopt.estimators.allocator.settings import AllocatorSettings
from memopt.estimators.allocator.trace import load_allocator_trace
from memopt.estimators.elsewhere.from_profile import estimate_trace
from memopt.estimators.snapshot.stacks import read_stack
from memopt.estimators.snapshot.trace import trace_of_snapshot
from memopt.trace import CATEGORIES, PHASES, load_trace
from tests.estimators.test_snapshot import DATA, snapshot_of

MIB = 1 << 20


@pytest.mark.parametrize("name", ["medium_512_inference", "bcrafton_h0c0e8a7", "medium_512_training"])
@pytest.mark.parametrize("since", [0, 1500])
def test_bytes_are_the_recorded_ones(tmp_path: Path, name: str, since: int) -> None:
    trace = trace_of_snapshot(snapshot_of(tmp_path, name, since=since))
    trace.save(tmp_path / "x.profile.json.gz")
    assert load_trace(tmp_path / "x.profile.json.gz") == trace
    recorded = load_allocator_trace(DATA / f"{name}.json.gz")
    allocations = sum(action == "alloc" for action, *_ in recorded.events[since:])
    assert sum(birth >= 0 for birth in trace.storages.birth_op) == allocations
    assert sum(len(trace.ops.writes.row(op)) for op in range(trace.op_count)) == allocations
    plain = replay(recorded.from_empty(), AllocatorSettings())
    found = estimate_trace(trace, device="a100-80gb")
    if since == 0:
        assert found.allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.002)
        assert found.reserved_bytes == pytest.approx(plain.peak_reserved_bytes, rel=0.01)
        assert trace.peak_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.002)
    assert found.partial


def test_live_bytes_by_an_independent_count(tmp_path: Path) -> None:
    """At the start of every op: what was there before, plus what came, less what went."""
    trace = trace_of_snapshot(snapshot_of(tmp_path, "medium_512_inference"))
    sizes = [-(-size // 512) * 512 for size in trace.storages.size_bytes]
    lives = list(zip(sizes, trace.storages.birth_op, trace.storages.death_op, strict=True))
    for op in range(0, trace.op_count, 7):
        assert trace.ops.live_bytes[op] == sum(s for s, b, d in lives if b < op <= d)
        assert trace.ops.extra_bytes[op] == sum(s for s, b, _ in lives if b == op)


def event(action: str, address: int, size: int, frames: list[tuple[str, int, str]]) -> dict[str, object]:
    stack = [{"filename": f, "line": n, "name": name} for f, n, name in frames]
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 10, "frames": stack}


TORCH = "/venv/site-packages/torch"
MODEL = [(f"{TORCH}/nn/modules/linear.py", 5, "__init__"), ("/home/me/train.py", 10, "main")]
FORWARD = [
    ("??", 0, "at::_ops::addmm::call(at::Tensor const&)"),
    (f"{TORCH}/nn/modules/linear.py", 125, "forward"),
    ("/home/me/net.py", 7, "forward"),
    ("/home/me/train.py", 20, "main"),
]
BACKWARD: list[tuple[str, int, str]] = []
STEP = [(f"{TORCH}/optim/adamw.py", 300, "step"), ("/home/me/train.py", 22, "main")]


def trained(tmp_path: Path, **changes: object) -> Path:
    """A step of training by hand: parameter, activation, gradient, state and a temporary of each phase."""
    rows = [
        ("alloc", 0, 4 * MIB, MODEL), ("alloc", 4 * MIB, 2 * MIB, FORWARD), ("alloc", 6 * MIB, MIB, FORWARD),
        ("free_completed", 6 * MIB, MIB, FORWARD), ("alloc", 8 * MIB, 4 * MIB, BACKWARD),
        ("free_completed", 4 * MIB, 2 * MIB, BACKWARD), ("alloc", 12 * MIB, 4 * MIB, STEP),
        ("alloc", 16 * MIB, MIB, STEP), ("free_completed", 16 * MIB, MIB, STEP),
    ]  # fmt: skip
    blocks = [
        {"address": a * MIB, "size": s * MIB, "requested_size": s * MIB, "state": state}
        for a, s, state in (
            (0, 4, "active_allocated"), (4, 4, "inactive"), (8, 4, "active_allocated"), (12, 4, "active_allocated"),
            (16, 4, "inactive"),
        )
    ]  # fmt: skip
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 20 * MIB,
        "segment_type": "large",
        "stream": 0,
        "blocks": blocks,
    }
    data = {"segments": [segment], "device_traces": [[event(*row) for row in rows]]} | changes
    path = tmp_path / "step.pickle"
    path.write_bytes(pickle.dumps(data))
    return path


def test_stacks_tell_phase_category_and_line(tmp_path: Path) -> None:
    trace = trace_of_snapshot(trained(tmp_path))
    kinds = [CATEGORIES[kind] for kind in trace.storages.category]
    assert kinds == ["parameter", "activation", "temporary", "gradient", "optimizer state", "temporary"]
    assert [PHASES[phase] for phase in trace.ops.phase] == ["other", "forward", "backward", "optimizer"]
    assert trace.storage_label(1) == "net.py:forward · aten.addmm"
    assert [trace.strings[line] for line in trace.ops.line] == ["train.py:10", "net.py:7", "", "train.py:22"]
    assert trace.storages.death_op == [4, 2, 1, 4, 4, 3]
    assert trace.peak_bytes == 13 * MIB
    found = estimate_trace(trace)
    assert found.allocated_bytes == 13 * MIB
    assert found.by_category == dict.fromkeys(("parameter", "gradient", "optimizer state"), 4 * MIB) | {
        "temporary": MIB
    }


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ("", ""),
        ("train.py:3 main", "other"),
        (f"{TORCH}/_tensor.py:500 backward\ntrain.py:3 main", "backward"),
        (f"{TORCH}/autograd/function.py:9 apply\nnet.py:3 forward", "forward"),
        (f"{TORCH}/utils/checkpoint.py:9 backward\nnet.py:3 forward", "backward"),
        (f"{TORCH}/optim/sgd.py:9 step", "optimizer"),
        ("?:? ?\n::::\n\n", "other"),
    ],
)
def test_phases_by_words(frames: str, phase: str) -> None:
    assert read_stack(frames).phase == phase


def test_segments_without_events(tmp_path: Path) -> None:
    trace = trace_of_snapshot(trained(tmp_path, device_traces=[[]]))
    assert (trace.op_count, trace.peak_bytes, trace.base_bytes) == (0, 12 * MIB, 12 * MIB)
    assert any("no events" in note for note in trace.notes)
    assert estimate_trace(trace).allocated_bytes == 12 * MIB
    with pytest.raises(BadFile, match="holds nothing"):
        trace_of_snapshot(trained(tmp_path, device_traces=[], segments=[]))
    with pytest.raises(BadFile, match="device 3"):
        trace_of_snapshot(trained(tmp_path), 3)


def test_no_batch_can_be_scaled(tmp_path: Path) -> None:
    with pytest.raises(NotPossibleHere, match="another batch size"):
        estimate_trace(trace_of_snapshot(trained(tmp_path)), batch_size=4)


class Evil:
    def __reduce__(self) -> tuple[object, object]:
        return print, ("it ran",)


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(tmp_path)
    assert run(["profile", "--from-snapshot", "step.pickle"]) == 0
    name = "memopt-step.profile.json.gz"
    assert "peak 13.0 MiB" in capsys.readouterr().err
    assert run(["profile", "--from-snapshot", "step.pickle"]) != 0
    assert run(["profile", "-f", "-q", "--from-snapshot", "step.pickle", "-o", name]) == 0
    assert run(["show", name]) == 0
    assert "snapshot" in capsys.readouterr().out
    assert run(["estimate", "--device", "rtx-4090", name]) == 0
    assert run(["advise", "--budget", "5MB", name]) == 1
    assert "holds allocations but no operators" in capsys.readouterr().err
    assert run(["profile", "--from-snapshot", "step.pickle", "train.py"]) == 2
    assert run(["profile"]) == 2
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps({"segments": Evil()}))
    assert run(["profile", "--from-snapshot", "evil.pickle"]) == 1
    told = capsys.readouterr()
    assert "holds code" in told.err
    assert "it ran" not in told.out
    assert not (tmp_path / "memopt-evil.profile.json.gz").exists()
    assert run(["profile", "--from-snapshot", "nowhere.pickle"]) == 2
