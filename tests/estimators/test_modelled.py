"""Recorded iterations on devices that are not here: flops against arithmetic, bytes against the simulator's own, plans marked."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from memopt.cli.main import run
from memopt.devices import find_device
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.elsewhere.device import on_cuda
from memopt.estimators.elsewhere.modelled import model_for_device
from memopt.estimators.elsewhere.op_shapes import op_call
from memopt.estimators.elsewhere.op_time import op_flops
from memopt.estimators.elsewhere.recording import amounts_of, recording_of
from memopt.estimators.hidden.beside_tensors import beside_tensors
from memopt.plan import load_plan
from memopt.trace import Trace, load_trace
from tests.support.profiled import profiler
from tests.support.toy_trace import toy_trace

SCRIPT = """
import torch

torch.manual_seed(0)
conv, strided = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 2, stride=2, groups=4)
up, head = torch.nn.ConvTranspose2d(8, 4, 2, stride=2), torch.nn.Linear(4 * 16 * 16, 10)
layers = torch.nn.ModuleList([conv, strided, up, head])
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(5, 3, 16, 16)
    h = up(strided(conv(x).relu()).sigmoid())
    scores = h.flatten(2) @ h.flatten(2).transpose(1, 2)
    loss = head(h.flatten(1)).square().mean() + scores.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CONV = 2 * (5 * 8 * 16 * 16) * (3 * 3 * 3)
STRIDED = 2 * (5 * 8 * 8 * 8) * (2 * 2 * 2)
UP = 2 * (5 * 8 * 8 * 8) * (4 * 2 * 2)
HEAD = 2 * 5 * (4 * 16 * 16) * 10
SCORES = 2 * 5 * 4 * 4 * 256


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modelled")
    (folder / "convs.py").write_text(SCRIPT)
    with profiler(folder) as profile:
        return profile(str(folder / "convs.py")).path


def flops_of(trace: Trace, *words: str) -> list[float]:
    calls = [op_call(trace, op) for op in range(trace.op_count)]
    return [op_flops(call) for call in calls if call.base_name in words and op_flops(call)]


def test_flops_by_arithmetic(recorded: Path) -> None:
    trace = load_trace(recorded)
    assert flops_of(trace, "convolution") == [CONV, STRIDED, UP]
    assert flops_of(trace, "convolution_backward") == [2 * UP, 2 * STRIDED, CONV]
    assert flops_of(trace, "addmm") == [HEAD]
    assert sorted(flops_of(trace, "mm")) == [HEAD, HEAD]
    assert flops_of(trace, "bmm") == [SCORES] * 3


def test_the_toy_on_a_gpu() -> None:
    trace, spec = toy_trace(), find_device("a100-40gb")
    moved = model_for_device(trace, spec)
    recording = recording_of(trace, on_cuda(trace, amounts_of(trace), spec), target="cuda")
    assert moved.peak_bytes == recording.peak()[0]
    assert moved.ops.live_bytes[0] + moved.ops.extra_bytes[0] == 3300 + 4000 + 2 * 8519680
    assert moved.device.modelled
    assert moved.device.kind == "cuda"
    assert moved.device.host_out_bytes_per_s > 0
    assert moved.step_ms == pytest.approx(sum(moved.ops.time_us) / 1000, abs=0.001)
    assert "modelled" in moved.notes[-1]
    assert (moved.storages, moved.slots, moved.values) == (trace.storages, trace.slots, trace.values)


def test_a_faster_gpu_is_faster_and_a_gpus_bytes_stay(recorded: Path) -> None:
    trace = load_trace(recorded)
    slow, fast = (model_for_device(trace, find_device(name)) for name in ("t4", "h100-80gb-sxm"))
    assert fast.step_ms <= slow.step_ms
    on_gpu = msgspec.structs.replace(trace, device=msgspec.structs.replace(trace.device, kind="cuda"))
    again = model_for_device(on_gpu, find_device("rtx-4090"))
    assert (again.peak_bytes, again.ops.live_bytes) == (trace.peak_bytes, trace.ops.live_bytes)


def test_what_cannot_be_moved() -> None:
    with pytest.raises(UsageError, match="only GPUs"):
        model_for_device(toy_trace(), find_device("cpu"))
    with pytest.raises(NotPossibleHere, match="cannot be planned"):
        model_for_device(toy_trace(partial="cut off"), find_device("t4"))


def test_plans_for_it_are_marked(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.plan.json"
    assert run(["advise", "--device", "rtx-4060", "--json", "-o", str(path), str(recorded)]) == 0
    plan = load_plan(path)
    assert plan.device.modelled
    spec = find_device("rtx-4060")
    beside = beside_tensors(model_for_device(load_trace(recorded), spec))
    assert plan.whole_budget_bytes == spec.memory_bytes
    assert plan.budget_bytes == spec.memory_bytes - beside.total_bytes
    assert beside.context_bytes > 0
    assert any("modelled for" in note for note in plan.notes)
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == plan.budget_bytes
    assert run(["advise", "--device", "nothing", "-f", "-o", str(path), str(recorded)]) == 2
    assert run(["advise", "-f", "-o", str(path), str(recorded)]) == 2
