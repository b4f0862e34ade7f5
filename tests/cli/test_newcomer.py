"""What somebody who types memopt for the first time is told, on the real command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memopt.cli.profile import Progress
from memopt.cli.shared.console import wrapped
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


def memopt(folder: Path, *args: str, program: tuple[str, ...] = (), **more: str) -> subprocess.CompletedProcess[str]:  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MEMOPT_", "RANK", "WORLD_SIZE", "COLUMNS"))}  # fmt: skip
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | more
    words = [*(program or (sys.executable,)), "-m", "memopt", *args]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_what_is_said_is_wrapped_at_words_and_commands_are_not() -> None:
    text = "memopt: no profile was written\n  a reason that is quite long and goes on and on\n  try: memopt profile --offload a/very/long/path/to/train.py"
    lines = wrapped(text, 40).splitlines()
    assert lines[1:3] == ["  a reason that is quite long and goes", "    on and on"]
    assert lines[3] == "  try: memopt profile --offload a/very/long/path/to/train.py"
    assert wrapped(text, None) == text


def test_eighty_columns_are_enough_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    assert memopt(tmp_path, "profile", "-o", "p.profile.json.gz", "train.py", "6").returncode == 0
    for command in (["doctor"], ["show", "p.profile.json.gz"], ["advise", "p.profile.json.gz", "--budget", "70%"], ["advise", "p.profile.json.gz", "--budget", "2KB"]):  # fmt: skip
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


def test_a_short_script_is_told_what_records_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = memopt(tmp_path, "profile", "train.py", "2")
    assert "memopt: running python train.py 2, to record iteration 3\n" in done.stderr
    command = next(line for line in done.stderr.splitlines() if "next: " in line).partition("next: memopt ")[2]  # fmt: skip
    assert command == "profile --warmup 0 train.py 2"
    again = memopt(tmp_path, *command.split())
    assert "partial" not in again.stderr
    assert "next: memopt advise" in again.stderr


def test_slow_iterations_are_told_of_as_they_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("memopt.cli.profile.time.monotonic", lambda: now[0])
    begins = Progress(3)
    begins.say("running")
    for iteration in (2, 3, 4, 5):
        now[0] += 0.1 if iteration == 5 else 1.5
        begins(iteration)
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
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = memopt(tmp_path, "profile", "-o", "p-%r.profile.json.gz", "train.py", "6", program=torchrun)
    assert done.returncode == 0, done.stderr
    assert "memopt: rank 1: wrote p-1.profile.json.gz" in done.stderr
    for rank in "01":
        plan = memopt(tmp_path, "advise", f"p-{rank}.profile.json.gz", "--budget", "80%", "-o", f"p-{rank}.plan.json")  # fmt: skip
        assert plan.returncode == 0, plan.stderr
    done = memopt(tmp_path, "apply", "p-%r.plan.json", program=torchrun)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stderr.splitlines()]
    assert [row[0] for row in rows if len(row) > 9 and row[-2] == "of"] == ["0", "1"]
    assert done.stderr.count("within the budget") + done.stderr.count("ABOVE the budget") == 1
    assert not list(Path("/tmp").glob("memopt-outcomes-*"))
