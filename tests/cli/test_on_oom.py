"""MEMOPT_ON_OOM: what a script that runs out of memory leaves behind, and that its error stays its own."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memopt.plan import load_plan
from memopt.profiler.out_of_memory import trace_of_now
from memopt.reports.inputs import read_inputs
from memopt.reports.page.html import page
from memopt.reports.page.moment import end_of, peak_of
from memopt.reports.terminal import render_trace
from memopt.trace import Script, load_trace
from tests.cli.test_show import drawn
from tests.support import warm
from tests.support.profiled import Profiler, profiler

TRAINS = """
import os, sys
os.environ["MEMOPT_ON_OOM"] = "left"
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(3)])
optimizer = torch.optim.AdamW(net.parameters())
for step in range(9):
    loss = net(torch.randn(512, 64)).square().mean()
    if step == int(sys.argv[1]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    folder = tmp_path_factory.mktemp("oom")
    (folder / "train.py").write_text(TRAINS)
    with profiler(folder) as server:
        yield server


def left(run: Profiler) -> Path:
    return run._folder / "left"


@pytest.mark.parametrize("step", [0, 2, 7], ids=["before the recording", "in it", "long after it"])
def test_a_profile_and_a_page_are_left_and_the_error_is_the_scripts(run: Profiler, step: int) -> None:
    for file in left(run).glob("*"):
        file.unlink()
    done = run.memopt("profile", "-f", "-o", "p.profile.json.gz", "--keep-running", "train.py", str(step))
    assert done["returncode"] == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB." in done["stderr"]
    assert 'File "' in done["stderr"]
    assert "memopt/cli" not in done["stderr"]
    trace = load_trace(left(run) / "oom_rank0.profile.json.gz")
    assert "out of memory" in trace.partial
    end = end_of(trace)
    assert end is not None or not trace.op_count
    held = sum(trace.storages.size_bytes) if end is None else end.named_bytes
    assert held > 6 * 512 * 256 * 4, "the activations of three layers are among it"
    assert "Out of memory" in (left(run) / "oom_rank0.report.html").read_text()


def test_a_run_under_a_plan_leaves_them_too(run: Profiler) -> None:
    assert run.memopt("profile", "-f", "-o", "q.profile.json.gz", "train.py", "99")["returncode"] == 0
    assert (
        run.memopt("advise", "-f", "q.profile.json.gz", "--budget", "80%", "-o", "q.plan.json")["returncode"]
        == 0
    )
    assert load_plan(run._folder / "q.plan.json").actions
    for file in left(run).glob("*"):
        file.unlink()
    done = run.memopt("apply", "q.plan.json", "--", "7")
    assert done["returncode"] == 1
    trace = load_trace(left(run) / "oom_rank0.profile.json.gz")
    assert any(trace.storage_label(s).startswith("Sequential.0.0.weight") for s in range(trace.storage_count))


def test_the_variable_is_read_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS.replace('os.environ["MEMOPT_ON_OOM"] = "left"', ""))
    env = os.environ | {"MEMOPT_ON_OOM": "there", "RANK": "3", "OMP_NUM_THREADS": "1"}
    done = warm.python(["-m", "memopt", "profile", "-q", "train.py", "1"], cwd=tmp_path, env=env)
    assert done.returncode == 1
    names = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert names == ["oom_rank3.profile.json.gz", "oom_rank3.report.html"]


def test_another_error_leaves_nothing(run: Profiler) -> None:
    for file in left(run).glob("*"):
        file.unlink()
    (run._folder / "raises.py").write_text(
        "import os, torch\nos.environ['MEMOPT_ON_OOM'] = 'left'\nraise ValueError('no')\n"
    )
    done = run.memopt("profile", "-f", "-o", "r.profile.json.gz", "raises.py")
    assert done["returncode"] == 1
    assert list(left(run).glob("*")) == []


def test_a_folder_that_cannot_be_written_changes_nothing(run: Profiler) -> None:
    target = left(run)
    if target.is_dir():
        shutil.rmtree(target)
    target.write_text("a file stands there")
    try:
        done = run.memopt("profile", "-f", "-o", "s.profile.json.gz", "train.py", "2")
    finally:
        target.unlink()
    assert done["returncode"] == 1
    assert "torch.OutOfMemoryError" in done["stderr"]
    assert "MEMOPT_ON_OOM: nothing more was written" in done["stderr"]


def test_what_is_there_now_is_found_without_a_recording() -> None:
    gc.collect()
    net = torch.nn.Linear(64, 128)
    net(torch.randn(32, 64)).sum().backward()
    hidden = net(torch.randn(32, 64)).exp().sin()
    trace = trace_of_now(Script(argv=["x.py"], cwd="/"), "now", "x.py:3")
    labels = {trace.storage_label(s): trace.storages.size_bytes[s] for s in range(trace.storage_count)}
    assert labels["Linear.weight · 128×64 fp32"] == 64 * 128 * 4
    assert labels["gradient of Linear.weight · 128×64 fp32"] == 64 * 128 * 4
    assert labels["saved by SinBackward0 (self) after Linear · 32×128 fp32"] == 32 * 128 * 4
    assert labels["saved by AddmmBackward0 (mat1) at Linear · 32×64 fp32"] == 32 * 64 * 4
    assert trace.strings[trace.ops.line[0]] == "x.py:3"
    saved = [each for each in peak_of(trace).held if each.label.startswith("saved by SinBackward0")]
    assert [each.module for each in saved] == ["Linear"]
    shown = drawn(render_trace(trace))
    assert "on the device when it ended (x.py:3)" in shown
    assert "op 0" not in shown
    assert "┤" not in shown, "one moment has no course to draw"
    assert hidden.grad_fn is not None


def test_no_hook_of_the_script_is_called_while_looking() -> None:
    called = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: called.append(1) or t):
        kept = torch.randn(1000, requires_grad=True).exp()
    trace = trace_of_now(Script(argv=["x.py"], cwd="/"), "now")
    assert called == []
    assert kept.grad_fn is not None
    assert trace.peak_bytes >= 4000


def test_a_profile_without_ops_is_shown_as_a_moment(run: Profiler, tmp_path: Path) -> None:
    for file in left(run).glob("*") if left(run).is_dir() else ():
        file.unlink()
    run.memopt("profile", "-f", "-o", "t.profile.json.gz", "train.py", "2")
    import msgspec

    from memopt.trace import Csr, Ops

    trace = load_trace(run._folder / "t.profile.json.gz")
    none = Csr(starts=[0], items=[])
    ops = Ops(**{name: none if name in ("reads", "writes") else [] for name in Ops.__struct_fields__})
    slots = {name: [] for name in ("storage", "value", "module", "ordinal", "node", "slot", "dtype", "offset", "consumer", "packed_before", "plain", "attributes")}  # fmt: skip
    bare = msgspec.structs.replace(
        trace,
        ops=ops,
        slots=type(trace.slots)(**slots, shape=none, stride=none, unpacks=none),
        values=type(trace.values)(storage=[], producer=[], output=[]),
        storages=msgspec.structs.replace(
            trace.storages, birth_op=[-1] * trace.storage_count, death_op=[0] * trace.storage_count, only_saved_from=[-1] * trace.storage_count,
        ),
        updates=None,
    )  # fmt: skip
    bare.save(tmp_path / "bare.profile.json.gz")
    inputs = read_inputs([tmp_path / "bare.profile.json.gz"])
    assert inputs.runs[0].trace.op_count == 1
    assert "Out of memory" in page(inputs, ["bare"])
