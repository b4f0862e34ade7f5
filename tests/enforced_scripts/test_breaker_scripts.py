"""Scripts that do to their surroundings what public scripts do: profiled, planned and applied as commands."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support import warm

ROOT = str(Path(__file__).resolve().parents[2])

MOVES_AWAY = """
import os, torch
from torch import nn
os.makedirs("outputs/run", exist_ok=True)
os.chdir("outputs/run")                     # as hydra does
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(torch.randn(512, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), os.path.basename(os.getcwd()))
"""


def _run(folder: Path, *words: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    return warm.python(list(words), cwd=folder, env=environment, cold=cold)


def test_a_script_that_changes_its_folder(tmp_path):
    (tmp_path / "train.py").write_text(MOVES_AWAY)
    plain = _run(tmp_path, "train.py")
    profiled = _run(tmp_path, "-m", "memopt", "profile", "-o", "p.json.gz", "train.py")
    assert profiled.returncode == 0, profiled.stderr
    advised = _run(
        tmp_path,
        "-m",
        "memopt",
        "advise",
        "p.json.gz",
        "--budget",
        "70%",
        "--deny",
        "swap",
        "-o",
        "plan.json",
    )
    assert advised.returncode == 0, advised.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["script"]["cwd"] == "./.", "beside its script"
    applied = _run(tmp_path, "-m", "memopt", "apply", "plan.json", "--outcome", "o.json")
    assert applied.returncode == 0, applied.stderr
    assert applied.stdout == plain.stdout
    assert json.loads((tmp_path / "o.json").read_text())["actions"]["done"] > 0


PACKAGE = """
import sys
print(__name__, sys.argv, "torch" in sys.modules)
import torch
torch.empty(100_000)  # older than any recording
"""

MODULE = """
import sys
import torch
print(__name__, __package__, sys.argv[1:])
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(256, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""


def test_a_package_is_imported_when_the_script_runs_and_as_part_of_it(tmp_path):
    """Its `__init__` sees what it sees under `python -m`, and torch, which it imports, is watched as everywhere."""
    for name in ("works", "fails"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(MODULE)
    (tmp_path / "works" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "fails" / "__init__.py").write_text("raise RuntimeError('a mistake of the package')\n")
    for name, code in (("works", 0), ("fails", 1)):
        plain = _run(tmp_path, "-m", f"{name}.train", "--lr", "1")
        words = "profile", "--keep-running", "-o", f"{name}.gz", "-m", f"{name}.train", "--lr", "1"
        profiled = _run(tmp_path, "-m", "memopt", *words, cold=True)
        assert (profiled.returncode, profiled.stdout) == (plain.returncode, plain.stdout)
        assert profiled.returncode == code
        last = profiled.stderr.splitlines()
        if name == "works":
            assert last[0].startswith("memopt: running python -m works.train")
            assert all(line.startswith("memopt: ") for line in last), (
                "torch's C++ says nothing of older blocks"
            )
            assert any(line.startswith("memopt: wrote works.gz") for line in last)
        else:
            assert "RuntimeError: a mistake of the package" in last
            assert not any(
                "memopt" in line and not line.startswith("memopt: running ")
                for line in last[: last.index("RuntimeError: a mistake of the package")]
            )


TRAINS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(64, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENDS = """
import sys
print("over", flush=True)
if sys.argv[1] == "closed":
    sys.stderr.close()
    sys.stdout.close()
else:
    class Tee:
        def write(self, text):
            sys.__stdout__.write(text)
    sys.stdout = Tee()
    print("out")
"""


def test_a_script_that_closes_or_replaces_its_streams_ends_as_ever(tmp_path):
    """As python ends what prints the same and trains nothing, and so needs no torch."""
    (tmp_path / "train.py").write_text(TRAINS + ENDS)
    (tmp_path / "ends.py").write_text(ENDS)
    for how in ("closed", "replaced"):
        plain = _run(tmp_path, "ends.py", how, cold=True)
        words = "profile", "--keep-running", "-o", f"{how}.gz", "train.py", how
        profiled = _run(tmp_path, "-m", "memopt", *words, cold=True)
        assert (profiled.returncode, profiled.stdout) == (plain.returncode, plain.stdout), profiled.stderr
        _run(tmp_path, "-m", "memopt", "advise", f"{how}.gz", "--budget", "200%", "-o", f"{how}.json")
        applied = _run(tmp_path, "-m", "memopt", "apply", f"{how}.json", cold=True)
        assert (applied.returncode, applied.stdout) == (plain.returncode, plain.stdout), applied.stderr
