"""`memopt run` of scripts that train in processes of their own: each is held within the budget, under a plan of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from memopt.plan import load_plan
from tests.support import warm

SCRIPT = Path(__file__).parents[1] / "scripts" / "hogwild.py"
RAISES = """
import torch
import torch.multiprocessing as mp

def train():
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(4):
        layer(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    raise ValueError("of the script's own")

if __name__ == "__main__":
    process = mp.get_context("fork").Process(target=train)
    process.start()
    process.join()
    print(process.exitcode)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.python(["-m", "memopt", "run", "--budget", "90%", *words], cwd=folder)


def outcome_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "o.json").read_text())
    return found


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_each_process_has_a_plan_and_begins_with_it_the_next_time(how: str, tmp_path: Path) -> None:
    words = ("--outcome", "o.json", "--force", str(SCRIPT), how)
    before = {*Path(tempfile.gettempdir()).glob("memopt-*.trained")}
    first = run(tmp_path, *words)
    assert (first.returncode, first.stdout) == (0, "[0, 0]\n"), first.stderr
    told = [line for line in first.stderr.splitlines() if ": recorded iteration 3" in line]
    assert len({line.split(": ")[1] for line in told}) == 2, first.stderr
    assert "nothing was enforced" not in first.stderr
    plans = [load_plan(path) for path in (tmp_path / ".memopt").glob("*.plan.json")]
    assert len(plans) == 2
    assert all(plan.actions for plan in plans)
    outcome = outcome_of(tmp_path)
    assert (outcome["iterations"], outcome["enforced_after"]) == (5, 3)
    assert outcome["outcome"]["actions"]["done"] == outcome["outcome"]["actions"]["planned"] > 0
    again = run(tmp_path, *words)
    assert (again.returncode, again.stdout) == (0, "[0, 0]\n"), again.stderr
    assert outcome_of(tmp_path)["from_cache"]
    assert {*Path(tempfile.gettempdir()).glob("memopt-*.trained")} == before


def test_a_process_that_raises_ends_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RAISES)
    done, plain = run(tmp_path, "train.py"), warm.python(["train.py"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (0, "1\n")
    assert "ValueError: of the script's own" in done.stderr
    assert "memopt: ForkProcess-1: recorded iteration 3" in done.stderr
    assert plain.stderr in done.stderr, "the traceback has no frame of memopt's"


def test_what_would_be_done_is_shown_of_the_first_process_that_trains(tmp_path: Path) -> None:
    done = run(tmp_path, "--dry-run", str(SCRIPT), "fork")
    assert (done.returncode, done.stdout) == (0, "[0, 0]\n"), done.stderr
    assert "recompute" in done.stderr
    assert not (tmp_path / ".memopt").exists()
