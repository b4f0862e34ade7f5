"""memopt from Python: `import memopt`, context managers, notebooks, and the callbacks with the trainers themselves."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import warnings
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

import memopt
from memopt.advisors.advise import advise
from memopt.advisors.profiles.plan_reader import read_plan
from memopt.errors import BadFile, RunFailed, UsageError
from memopt.outcome import Outcome
from memopt.reports.inputs import read_inputs
from memopt.reports.page.data import run_data
from memopt.trace import load_trace
from tests.cli.test_show import OUTCOME
from tests.support.toy_trace import toy_trace

ROOT = Path(__file__).parents[2]


def test_importing_memopt_imports_nothing_heavy() -> None:
    code = "import sys, memopt; heavy = {'torch', 'pandas', 'plotly', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_is_there() -> None:
    assert memopt.__all__ == sorted(memopt.__all__)
    assert all(getattr(memopt, name) for name in memopt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memopt.nothing  # type: ignore[attr-defined]  # noqa: B018


# --- load


def test_a_profile_has_tables_a_figure_and_a_page(tmp_path: Path) -> None:
    toy_trace().save(tmp_path / "toy.profile.json.gz")
    found = memopt.load(tmp_path / "toy.profile.json.gz")
    assert found.to_pandas().query("at_peak").size_bytes.sum() == 8800
    assert found.to_pandas("ops").name.tolist()[0] == "aten.addmm.default"
    assert type(found.plot()).__name__ == "Figure"
    assert found.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "8.69 KiB" in repr(found)
    assert "<script" not in found._repr_html_()
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found)
    assert "Peak 8.69 KiB" in console.export_text()
    with pytest.raises(ValueError, match="no table 'rows'"):
        found.to_pandas("rows")


def test_what_notebooks_show_is_escaped(tmp_path: Path) -> None:
    from memopt.trace import Script

    toy_trace(script=Script(argv=["<script>alert(1)</script>"], cwd="/"), notes=["<img src=x>"]).save(
        tmp_path / "a.profile.json.gz"
    )
    text = memopt.load(tmp_path / "a.profile.json.gz")._repr_html_()
    assert "<script>" not in text
    assert "<img" not in text


def test_outcomes_and_estimates_load_too(tmp_path: Path) -> None:
    msgspec.convert(OUTCOME, Outcome).save(tmp_path / "outcome.json")
    found = memopt.load(tmp_path / "outcome.json")
    assert found.to_pandas().loc["peak_bytes"].tolist() == [8900.0, 6800.0, 6900.0]
    assert len(found.plot().data[0].x) == 3
    estimated = memopt.estimate(_profile(tmp_path))
    (tmp_path / "estimate.json").write_text(json.dumps(estimated.as_json()))
    assert memopt.load(tmp_path / "estimate.json").to_pandas().size_bytes.sum() == sum(
        estimated.by_category.values()
    )
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(BadFile):
        memopt.load(tmp_path / "x.json")


def _profile(folder: Path) -> Path:
    from tests.support.layers_trace import build, chain

    build(chain([1 << 20, 1 << 20])).save(folder / "p.profile.json.gz")
    return folder / "p.profile.json.gz"


def test_estimate_takes_arguments_of_scripts_only(tmp_path: Path) -> None:
    assert memopt.estimate(_profile(tmp_path)).allocated_bytes > 2 << 20
    with pytest.raises(UsageError, match="is not understood"):
        memopt.estimate(_profile(tmp_path), "--lr", "1")


# --- profile and enforce


def train(steps: int, name: str = "") -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of a small net, whose parts are called `name` and a number, after so many steps."""
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    for number in range(4):
        part = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        net.add_module(f"{name}{number}", part)
    optimizer = torch.optim.AdamW(net.parameters())
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(1024, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in net.parameters()]


def test_a_block_is_profiled_planned_and_enforced_to_the_same_bits(tmp_path: Path) -> None:
    plain = train(5)
    with memopt.profile(tmp_path / "run.profile.json.gz") as found:
        recorded = train(5)
    trace = load_trace(tmp_path / "run.profile.json.gz")
    assert found.peak_bytes == trace.peak_bytes > 4 * 1024 * 256 * 4
    assert not trace.partial
    plan = advise(trace, budget_bytes=int(trace.peak_bytes * 0.75))
    assert plan.actions
    plan.save(tmp_path / "plan.json")
    with memopt.enforce(tmp_path / "plan.json") as under:
        enforced = train(5)
    assert under.outcome is not None
    assert under.outcome.actions.done == len(plan.actions)
    for other in (recorded, enforced):
        assert other[0] == plain[0]
        assert all(torch.equal(a, b) for a, b in zip(other[1], plain[1], strict=True))
    with memopt.profile(tmp_path / "run.profile.json.gz", force=True):
        train(4)
    with pytest.raises(UsageError, match="exists already"), memopt.profile(tmp_path / "run.profile.json.gz"):
        train(4)


def test_a_name_of_two_million_characters_is_cut_alike_in_every_run(tmp_path: Path) -> None:
    """Of modules that differ in their last character only."""
    name, path = "N" * 2_000_000, tmp_path / "run.profile.json.gz"
    with memopt.profile(path):
        recorded = train(4, name)
    trace = load_trace(path)
    assert max(map(len, trace.strings)) < 1000
    assert len({text for text in trace.strings if re.fullmatch(r"Sequential\.N+….*…N+\d\.0#0", text)}) == 4
    plan = advise(trace, budget_bytes=int(trace.peak_bytes * 0.75))
    plan.save(tmp_path / "plan.json")
    with memopt.enforce(tmp_path / "plan.json") as under:
        enforced = train(4, name)
    assert under.outcome is not None
    assert under.outcome.actions.done == len(plan.actions) > 0
    assert enforced[0] == recorded[0]


@pytest.mark.parametrize("share", [0.95, 0.9, 0.75])
def test_a_plan_that_moves_the_optimizer_is_drawn_as_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Be it inside backward or in pieces, whichever the planner takes."""
    monkeypatch.setattr("memopt.instrument.stepping.premises.speaks_of_gradients", lambda: "")
    path = tmp_path / "wide.profile.json.gz"
    with memopt.profile(path):
        net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            loss = net(torch.randn(4, 512)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
    trace = load_trace(path)
    plan = advise(trace, budget_bytes=int(share * trace.peak_bytes), profile=path.name)
    assert plan.script_actions
    read = read_plan(plan, trace)
    assert read.moves_the_optimizer
    assert (read.timeline.peak_bytes, read.timeline.step_ms) == (
        plan.predicted_peak_bytes,
        plan.predicted_step_ms,
    )
    plan.save(tmp_path / "wide.plan.json")
    found = memopt.load(tmp_path / "wide.plan.json")
    assert max(found.plot().data[0].y) == plan.predicted_peak_bytes
    text = found.report(tmp_path / "page.html").read_text()
    assert plan.script_actions[0].what[1:] in text
    assert 'data-set="run=1"' in text, "the run as it is, and with its optimizer moved"
    (run,) = read_inputs([tmp_path / "wide.plan.json"]).runs
    assert run_data(run)["after"] is None
    moved = run.with_optimizer_moved()
    assert moved is not None
    data = run_data(moved)
    assert data["n"] == moved.trace.op_count
    assert max(accumulate(data["after"])) == plan.predicted_peak_bytes


def test_a_block_that_trains_nothing_says_so() -> None:
    with pytest.raises(RunFailed, match="no profile was written"), memopt.profile():
        pass


def test_a_block_that_raises_raises_the_same(tmp_path: Path) -> None:
    def fail() -> None:
        train(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), memopt.profile(tmp_path / "p.profile.json.gz"):
        fail()
    assert load_trace(tmp_path / "p.profile.json.gz").partial


# --- notebooks and trainers


def test_the_magic_shows_the_profile_of_a_cell() -> None:
    pytest.importorskip("IPython")
    code = """
import warnings
warnings.simplefilter("ignore")
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "memopt")
cell = '''
import torch
net = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad(); net(torch.randn(512, 256)).square().mean().backward(); optimizer.step()
'''
found = shell.run_cell_magic("memopt", "", cell)
print(found._repr_html_())
shell.run_cell_magic("memopt", "--nonsense", cell)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=os.environ | {"IPYTHONDIR": "/tmp/memopt-ipython"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "One step peaks at" in done.stdout.replace("\u00a0", " ")
    assert "is not understood" in done.stdout


@pytest.mark.script
def test_a_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    train_cell = "%%memopt\nimport torch\nnet = torch.nn.Linear(64, 64)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\nfor _ in range(5):\n    optimizer.zero_grad(); net(torch.randn(512, 64)).square().mean().backward(); optimizer.step()"
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell("%load_ext memopt"), nbformat.v4.new_code_cell(train_cell)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient.NotebookClient(
            book, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
    shown = book.cells[1].outputs[-1]["data"]["text/html"]
    assert "One step peaks at" in shown.replace("\u00a0", " ")


def test_the_transformers_callback_with_the_real_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    code = f"""
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from memopt.integrations.transformers import MemoptCallback

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)) for _ in range(3)])
    def forward(self, x, labels):
        return {{"loss": (self.body(x) - labels).square().mean()}}

class Sees(TrainerCallback):
    seen = []
    def on_log(self, args, state, control, logs=None, **kwargs):
        Sees.seen.append(dict(logs))

def run(**options):
    torch.manual_seed(0)
    rows = [{{"x": torch.randn(32), "labels": torch.randn(32)}} for _ in range(2560)]
    args = TrainingArguments(output_dir={str(tmp_path)!r}, max_steps=8, per_device_train_batch_size=256, logging_steps=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=1)
    trainer = Trainer(model=Net(), args=args, train_dataset=rows, callbacks=[Sees()])
    callback = MemoptCallback(**options).attach(trainer)
    trainer.train()
    return callback, [parameter.detach().clone() for parameter in trainer.model.parameters()], trainer.state.log_history

callback, plain, history = run()
assert any(name.startswith("memopt/") for name in history[0]), history[0]
assert any(name.startswith("memopt/") for name in Sees.seen[0]), "callbacks after ours get the figures"
callback, recorded, _ = run(profile={str(tmp_path / "hf.profile.json.gz")!r})
assert callback.result.peak_bytes > 0
import memopt
from memopt.advisors.advise import advise
from memopt.reports.inputs import read_inputs
from memopt.reports.page.data import run_data
from memopt.trace import load_trace
from pathlib import Path
trace = load_trace(Path({str(tmp_path / "hf.profile.json.gz")!r}))
plan = advise(trace, budget_bytes=int(trace.peak_bytes * 0.9))
plan.save(Path({str(tmp_path / "hf.plan.json")!r}))
callback, enforced, _ = run(plan={str(tmp_path / "hf.plan.json")!r})
assert callback.result.outcome.actions.done > 0, callback.result.outcome
for other in (recorded, enforced):
    assert all(torch.equal(a, b) for a, b in zip(plain, other))
print("equal")
"""
    _ends_equal(code, tmp_path)


def test_the_lightning_callback_with_the_real_trainer(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    code = f"""
import warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import LightningModule, Trainer
from memopt.integrations.lightning import MemoptCallback

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
    def training_step(self, batch, index):
        return (self.body(batch) - batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

def run(**options):
    torch.manual_seed(0)
    callback = MemoptCallback(**options)
    trainer = Trainer(max_steps=8, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    net = Net()
    trainer.fit(net, torch.utils.data.DataLoader(torch.randn(512, 32), batch_size=64))
    assert any(name.startswith("memopt/") for name in trainer.callback_metrics), trainer.callback_metrics
    return callback, [parameter.detach().clone() for parameter in net.parameters()]

_, plain = run()
callback, recorded = run(profile={str(tmp_path / "pl.profile.json.gz")!r})
assert callback.result.peak_bytes > 0
assert all(torch.equal(a, b) for a, b in zip(plain, recorded))
print("equal")
"""
    _ends_equal(code, tmp_path)


def _ends_equal(code: str, folder: Path) -> None:
    """In a process of its own, as it compares what it has trained."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=_offline(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")


def _offline() -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "WANDB_DISABLED": "true",
    }


def test_callbacks_take_one_of_profile_and_plan() -> None:
    from memopt.integrations.steps import Steps

    with pytest.raises(UsageError, match="one of"):
        Steps(profile="a", plan="b")
    figures: dict[str, Any] = Steps().figures()
    assert all(value > 1e6 for value in figures.values())
