"""What somebody who types memopt for the first time is told, on the real command line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memopt.cli.profile import Progress
from memopt.cli.shared.console import progress, say, wrapped
from tests.support import warm
from tests.support.profiled import ROOT

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(int(sys.argv[1])):
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""


TORCHRUN = ("-c", "from torch.distributed.run import main; main()", "--standalone", "--nproc-per-node", "2")
"""Spared torch's import itself; the ranks that it starts are not."""


def memopt(folder: Path, *args: str, program: tuple[str, ...] = (), **more: str) -> subprocess.CompletedProcess[str]:  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MEMOPT_", "RANK", "WORLD_SIZE", "COLUMNS"))}  # fmt: skip
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | more
    return warm.python([*program, "-m", "memopt", *args], cwd=folder, env=env)


def test_what_is_said_is_wrapped_at_words_and_commands_are_not() -> None:
    text = "memopt: no profile was written\n  a reason that is quite long and goes on and on\n  try: memopt profile --offload a/very/long/path/to/train.py"
    lines = wrapped(text, 40).splitlines()
    assert lines[1:3] == ["  a reason that is quite long and goes", "    on and on"]
    assert lines[3] == "  try: memopt profile --offload a/very/long/path/to/train.py"
    assert wrapped(text, None) == text


def test_eighty_columns_are_enough_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    assert memopt(tmp_path, "profile", "-o", "p.profile.json.gz", "train.py", "6").returncode == 0
    advise = ["advise", "p.profile.json.gz", "--time-limit", "1", "--budget"]
    for command in (["doctor"], ["show", "p.profile.json.gz"], [*advise, "70%"], [*advise, "2KB"]):
        done = memopt(tmp_path, *command, COLUMNS="80")
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "memopt advise" not in line]
        assert max(map(len, lines)) <= 80, command
        assert "1.00…" not in done.stdout
    assert "budget 2KB (1.95 KiB) cannot be met" in done.stderr
    assert len(done.stderr.replace("\n    ", " ").splitlines()) == 4  # three lines and a command
    shown = memopt(tmp_path, "show", "p.profile.json.gz").stdout
    assert "Sequential.0-5.0.weight ×6" in shown


def test_a_script_that_raises_before_it_trains_is_told_to_have_raised(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("import torch\nraise ValueError('no data')\n")
    done = memopt(tmp_path, "profile", "raises.py")
    assert done.returncode == 1
    assert "no profile was written: the script raised: ValueError: no data, before it trained" in done.stderr
    assert "trained nothing" not in done.stderr
    (tmp_path / "usage.py").write_text("raise SystemExit(3)\n")
    done = memopt(tmp_path, "profile", "usage.py")
    assert (done.returncode, "the script ended with exit code 3" in done.stderr) == (3, True)


def test_a_script_that_only_starts_another_program_is_told_what_to_put_memopt_before(tmp_path: Path) -> None:
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
    (tmp_path / "busy.py").write_text(starts.format("import time\nwhile time.process_time() < 1.2: pass"))
    (tmp_path / "idle.py").write_text(starts.format("pass"))
    for command in (["profile"], ["run", "--budget", "60%"]):
        told = " ".join(memopt(tmp_path, *command, "busy.py").stderr.split())
        assert "1 s of processor time" in told
        assert "the command that the script itself starts, with memopt before it" in told
        assert "processor time" not in memopt(tmp_path, *command, "idle.py").stderr


def test_a_short_script_is_profiled_in_its_last_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = memopt(tmp_path, "profile", "train.py", "2")
    assert "memopt: running python train.py 2, to record iteration 3\n" in done.stderr
    assert "the script made 2 iterations only, and this is number 2" in done.stderr
    assert "partial" not in done.stderr
    assert "next: memopt advise" in done.stderr


def test_a_test_that_trains_is_stopped_without_a_failure(tmp_path: Path) -> None:
    """For pytest a `SystemExit` is a failure, whose report shows memopt's own code."""
    body = "".join(f"    {line}\n" for line in TRAIN.replace("sys.argv[1]", "8").splitlines())
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.parametrize('w', [1, 2])\ndef test_it(w):\n{body}"
    )
    done = memopt(tmp_path, "profile", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    assert done.returncode == 0
    assert "StopScript" not in done.stdout
    assert "failed" not in done.stdout
    assert "memopt has what it was asked to record" in done.stdout
    assert (tmp_path / "memopt-pytest.profile.json.gz").exists()


LIBRARY = """
import torch
class Attention(torch.nn.Module):
    def forward(self, x):
        weights = (x @ x.transpose(-1, -2)).softmax(-1)
        return weights @ x
"""


def test_a_lint_of_a_librarys_line_names_it_and_the_argument_that_changes_it(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "transformers"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("")
    (library / "modeling_it.py").write_text(LIBRARY)
    layers = "*[torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)) for _ in range(6)]"
    text = TRAIN.replace(layers, "torch.nn.Linear(64, 64), Attention()").replace(
        "randn(512,", "randn(8, 128,"
    )
    found_in = f"import sys; sys.path.insert(0, {str(library.parent)!r}); "
    script = f"{found_in}from transformers.modeling_it import Attention\n{text}"
    (tmp_path / "train.py").write_text(script)
    profiled = memopt(tmp_path, "profile", "-o", "p.json.gz", "train.py", "6")
    assert profiled.returncode == 0, profiled.stderr
    told = memopt(tmp_path, "show", "p.json.gz", COLUMNS="80")
    found = " ".join((told.stdout + told.stderr).split())
    assert "attention-without-sdpa" in found
    assert "at transformers: modeling_it.py:5, from train.py:8 " in found
    assert 'try: attn_implementation="sdpa" in from_pretrained() or in the configuration' in found


def test_slow_iterations_are_told_of_as_they_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("memopt.cli.profile.time.monotonic", lambda: now[0])
    begins = Progress()
    begins.say("running")
    for iteration in (2, 3, 4, 5):
        now[0] += 0.1 if iteration == 5 else 1.5
        begins(iteration, 3)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "memopt: iteration 2 of 3, before the recorded one",
        "memopt: recording iteration 3 of 3",
        "memopt: timing iteration 4, without recording",
    ]


@pytest.mark.slow
def test_the_first_rank_tells_of_all(tmp_path: Path) -> None:
    start = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    end = "other = torch.randn(64, 64, requires_grad=True) if dist.get_rank() else None\ndist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(start + TRAIN + end)
    done = memopt(tmp_path, "profile", "-o", "p-%r.profile.json.gz", "train.py", "6", program=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "memopt: rank 1: wrote p-1.profile.json.gz" in done.stderr
    for rank in "01":
        plan = memopt(tmp_path, "advise", f"p-{rank}.profile.json.gz", "--budget", "80%", "-o", f"p-{rank}.plan.json")  # fmt: skip
        assert plan.returncode == 0, plan.stderr
    done = memopt(tmp_path, "apply", "p-%r.plan.json", program=TORCHRUN)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stderr.splitlines()]
    assert [row[0] for row in rows if len(row) > 9 and row[-2] == "of"] == ["0", "1"]
    assert done.stderr.count("within the budget") + done.stderr.count("ABOVE the budget") == 1
    assert not list(Path("/tmp").glob("memopt-outcomes-*"))


def test_what_cannot_be_meant_is_refused_before_anything_is_looked_at(tmp_path: Path) -> None:
    done = memopt(tmp_path, "apply", "--deterministic", "nowhere.plan.json")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "memopt: --deterministic goes with --verify")
    (tmp_path / "p.profile.json.gz").write_bytes(b"")
    done = memopt(tmp_path, "advise", "--budget", "60%", "--pareto")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "memopt: choose one goal")
    done = memopt(tmp_path, "advise", "--budget", "60%", "--batch-arg=--bs")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "memopt: --batch-arg goes with --max-batch")


def test_points_of_a_curve_are_counted_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("memopt.cli.shared.console.time.monotonic", lambda: now[0])
    with progress("planning", total=4, unit="point") as step:
        for _ in range(4):
            now[0] += 1.5
            step(1)
    assert capsys.readouterr().err.splitlines() == [
        "memopt: planning", "memopt: point 2 of 4", "memopt: point 3 of 4", "memopt: point 4 of 4",
    ]  # fmt: skip


def test_the_largest_batch_ends_with_the_command_that_runs_it(tmp_path: Path) -> None:
    told = "import sys\nprint(sys.argv[1:], file=sys.stderr)\n"
    (tmp_path / "train.py").write_text(told + TRAIN.replace("randn(512", "randn(int(sys.argv[3])"))
    (tmp_path / "fixed.py").write_text(TRAIN)
    memopt(tmp_path, "profile", "-o", "p.profile.json.gz", "train.py", "6", "--batch-size", "512")
    memopt(tmp_path, "profile", "-o", "fixed.profile.json.gz", "fixed.py", "6")
    search = ("--max-batch", "--budget", "9MiB", "--time-limit", "0.1")
    found = memopt(tmp_path, "advise", "p.profile.json.gz", *search, "--json", "-o", "p.plan.json")
    (command,) = [line for line in found.stderr.splitlines() if line.startswith("memopt: next: ")]
    with_plan = json.loads(found.stdout)["with_plan"]
    assert with_plan["batch"] > json.loads(found.stdout)["without_plan"]["batch"] > 64
    done = memopt(
        tmp_path, *shlex.split(command.removeprefix("memopt: next: memopt ")), "--outcome", "o.json"
    )
    assert done.returncode == 0, done.stderr
    assert f"['6', '--batch-size', '{with_plan['batch']}']" in done.stderr
    measured = json.loads((tmp_path / "o.json").read_text())["measured_peak_bytes"]
    assert measured == pytest.approx(with_plan["peak_bytes"], rel=0.02)
    found = memopt(tmp_path, "advise", "fixed.profile.json.gz", *search, "-o", "fixed.plan.json")
    assert "which no argument of the script sets" in found.stderr
    assert "memopt: next: " not in found.stderr


@pytest.mark.parametrize("shown", [True, False])
def test_what_is_said_is_not_in_the_line_of_a_progress_bar(
    shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tqdm's, which each training script has; where none is shown its locks are not made."""

    class Bars:
        _instances = [object()] if shown else []

        @staticmethod
        @contextmanager
        def external_write_mode(file: Any) -> Iterator[None]:
            print("(cleared)", file=file)
            yield
            print("(shown again)", file=file)

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bars))
    say("under its plan")
    said = capsys.readouterr().err.splitlines()
    assert said == (["(cleared)", "memopt: under its plan", "(shown again)"] if shown else ["memopt: under its plan"])  # fmt: skip
