"""What is ready for a GPU in benchmarks/gpu, as far as a CPU can tell: the table, the training script, the file and the comparison."""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.gpu import compare, measure, record, train
from benchmarks.gpu.configurations import CONFIGURATIONS, OPTIMIZERS, PRECISIONS
from benchmarks.models.language_models import MODELS as LANGUAGE_MODELS
from memopt.errors import BadFile
from memopt.estimators.allocator.trace import AllocatorTrace, load_allocator_trace, replay_trace
from memopt.estimators.estimate import estimate_script

ROOT = Path(__file__).parents[2]
TRACE = Path(__file__).parent.parent / "data" / "allocator_traces" / "medium_512_training.json.gz"
NAME = "gpt2 8 fp32 adamw"


def test_table_has_what_the_benchmark_asks_for():
    rows = CONFIGURATIONS.values()
    models = {row.model for row in rows}
    assert len(rows) == 36
    assert len(models & set(LANGUAGE_MODELS)) == 6
    assert models - set(LANGUAGE_MODELS) == {
        "resnet50",
        "vgg16",
        "mobilenet_v2",
        "unet",
        "convnext_tiny",
        "vit",
    }
    assert {row.precision for row in rows} == set(PRECISIONS)
    assert {row.optimizer for row in rows} == set(OPTIMIZERS)
    for model in models:
        found = [row for row in rows if row.model == model]
        assert len({row.precision for row in found}) == 3 or model == "vgg16"
        assert len({row.optimizer for row in found}) >= 2


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_configuration_trains_on_a_cpu(name, capsys):
    row = CONFIGURATIONS[name]
    words = [row.model, "2", *row.argv[2:], "--tiny", "--device", "cpu"]
    train.main(words)
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)


class Cuda:
    """Stands for `torch.cuda`: the snapshot, the peaks and the order of calls of a run that was recorded elsewhere."""

    def __init__(self, trace: AllocatorTrace) -> None:
        self.trace, self.recording = trace, False
        events = [
            {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 1}
            for action, address, size, stream in trace.events
        ]
        snapshot = {"device_traces": [[*events, {"action": "snapshot", "addr": 0, "size": 0, "stream": 0}]], "segments": [{"is_expandable": False}]}  # fmt: skip
        self.memory = SimpleNamespace(_record_memory_history=self.start, _snapshot=lambda: snapshot)

    def start(self, enabled: str, **settings: Any) -> None:
        assert settings["context"] is None  # stacks would slow the run down and make the file large
        self.recording = enabled == "all"

    def synchronize(self) -> None: ...

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000)

    def max_memory_allocated(self) -> int:
        return 7000

    def max_memory_reserved(self) -> int:
        return 9000

    def memory_allocated(self) -> int:
        return self.trace.end_allocated

    def memory_reserved(self) -> int:
        return self.trace.end_reserved


def recorded_run(**changes: Any) -> dict[str, Any]:
    """A run with the events of a real one, whose peaks are the replay's."""
    trace = load_allocator_trace(TRACE)
    peaks = replay_trace(trace)
    run = measure.measure(NAME, lambda argv: None, Cuda(trace), iter([0, 20 << 30]).__next__)
    run["trace"]["init"] = trace.init
    return run | {"allocated_bytes": peaks.peak_allocated_bytes, "reserved_bytes": peaks.peak_reserved_bytes} | changes  # fmt: skip


def test_a_run_holds_peaks_and_the_events_as_the_allocator_told_them():
    trace = load_allocator_trace(TRACE)
    cuda, given = Cuda(trace), []
    run = measure.measure(
        NAME, lambda argv: given.append((argv, cuda.recording)), cuda, iter([400, 10**12]).__next__
    )
    assert given == [(["gpt2", "8", "fp32", "adamw"], True)]
    assert (run["allocated_bytes"], run["reserved_bytes"], run["process_bytes"]) == (7000, 9000, 10**12 - 400)
    assert run["status"] == "ok"
    decoded = msgspec.convert(json.loads(json.dumps(run)), type=compare.Run)
    assert decoded.trace == msgspec.structs.replace(trace, init=[])


def test_a_run_out_of_memory_is_told_as_one():
    def fail(argv: list[str]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run = measure.measure(NAME, fail, Cuda(load_allocator_trace(TRACE)), lambda: 10**12)
    assert run["status"] == "out of memory"


def test_recording_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    done = []

    def run_alone(command: list[str], limit_s: float) -> dict[str, Any] | str:
        done.append(command[-1])
        return (
            "not done in 90 s"
            if command[-1] == "b" and done.count("b") == 1
            else recorded_run(name=command[-1])
        )

    monkeypatch.setattr(record, "run_alone", run_alone)
    assert record.record(tmp_path, ["a", "b", "c"], limit_s=1e3, run_limit_s=90) == 1
    assert record.record(tmp_path, ["a", "b", "c"], limit_s=1e3, run_limit_s=90) == 0
    assert done == ["a", "b", "c", "b"]
    assert [run.name for run in compare.load_runs(tmp_path)] == ["a", "c", "b"]
    assert [path.name for path in tmp_path.iterdir()] == [record.FILE]
    assert "b: not done in 90 s" in capsys.readouterr().out


def test_recording_starts_nothing_when_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "run_alone", lambda *_: pytest.fail("was started"))
    assert record.record(tmp_path, ["a"], limit_s=10, run_limit_s=90) == 1


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('step'); print('{\"name\": \"x\"}')", {"name": "x"}),
        ("raise SystemExit('no GPU')", "no GPU"),
        ("import time; time.sleep(60)", "not done in 1 s"),
    ],
)
def test_a_process_of_its_own(code, told):
    assert record.run_alone([sys.executable, "-c", code], 1.4 if "sleep" in code else 60) == told


def test_all_events_of_36_runs_stay_small(tmp_path):
    """What is committed must stay small: one file of less than 16 MiB."""
    record.append(tmp_path / record.FILE, recorded_run())
    assert (tmp_path / record.FILE).stat().st_size * len(CONFIGURATIONS) < 4 << 20


def test_comparison_tells_errors_and_replays_the_events(tmp_path, monkeypatch, capsys):
    run = recorded_run()
    for name, share in {NAME: 1.0, "vit 64 fp32 adamw": 1.03, "unet 16 bf16 sgd": 0.98}.items():
        record.append(tmp_path / record.FILE, run | {"name": name})
        monkeypatch.setitem(SHARES, name, share)
    monkeypatch.setattr(compare, "predicted", shared)
    assert compare.compare(tmp_path, []) == 0
    out = capsys.readouterr().out
    assert "peak reserved: 3 rows, median 2.00 %, p95 3.00 %, worst 3.00 %, 1 under" in out
    assert "under: unet 16 bf16 sgd -2.0 %" in out
    assert out.count("events as recorded") == 3


SHARES: dict[str, float] = {}


def shared(run: compare.Run) -> Any:
    share = SHARES[run.name]
    return SimpleNamespace(
        allocated_bytes=share * run.allocated_bytes,
        reserved_bytes=share * run.reserved_bytes,
        process_bytes=share * run.process_bytes,
    )


def test_comparison_counts_runs_whose_events_do_not_replay(tmp_path, monkeypatch, capsys):
    record.append(tmp_path / record.FILE, recorded_run(reserved_bytes=1))
    monkeypatch.setitem(SHARES, NAME, 1.0)
    monkeypatch.setattr(compare, "predicted", shared)
    assert compare.compare(tmp_path, []) == 1
    assert "EVENTS DIFFER" in capsys.readouterr().out


@pytest.mark.script
def test_a_configuration_is_estimated_for_the_device_of_the_run(monkeypatch):
    tiny = SimpleNamespace(argv=["gpt2", "2", "fp32", "adamw-fused", "--tiny"])
    monkeypatch.setitem(compare.CONFIGURATIONS, NAME, tiny)
    found = compare.predicted(msgspec.convert(recorded_run(), type=compare.Run))
    assert found.device == "h200"
    assert not found.partial
    assert found.allocated_bytes > 2 * 33_554_432  # cuBLAS's workspaces on Hopper, one for each thread


@pytest.mark.parametrize(
    "data",
    [b"", b"no gzip", gzip.compress(b"{}\n"), gzip.compress(b"[1]\n")[:-9]],
    ids=["empty", "no gzip", "another header", "truncated"],
)
def test_a_file_of_another_kind_is_refused(tmp_path, data):
    (tmp_path / record.FILE).write_bytes(data)
    if not data:
        assert compare.load_runs(tmp_path) == []
        return
    with pytest.raises(BadFile):
        compare.load_runs(tmp_path)


def test_the_peak_of_a_run_on_an_h100_is_estimated_to_half_a_percent(capsys):
    figures = json.loads((ROOT / "benchmarks" / "gpu" / "data" / "h100_headline.jsonl").read_text())
    assert figures["job"] == "headline gpt2"
    command = ["benchmarks.gpu.train", "gpt2", "16", "bf16", "adamw-fused", "--steps", "12"]
    for peer in ([], ["--peer", "checkpoint"]):
        measured = figures["checkpoint" if peer else "plain"]
        found = estimate_script([*command, *peer], as_module=True, device="h100-80gb-sxm", steps=2)
        assert found.allocated_bytes == pytest.approx(measured["allocated"], rel=0.005)
        assert found.reserved_bytes == pytest.approx(measured["reserved"], rel=0.005)
