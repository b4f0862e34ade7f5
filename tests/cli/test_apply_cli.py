"""`memopt apply`: whose option is whose."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import warm

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
print(sys.argv[1:])
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = model(torch.randn(2048, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item().hex())
"""


def memopt(folder: Path, *args: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return warm.python(["-m", "memopt", *args], cwd=folder, env=env, timeout=120, cold=cold)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apply")
    (folder / "train.py").write_text(SCRIPT)
    for args in (["profile", "-o", "p.json.gz", "train.py", "--lr", "1"], ["advise", "p.json.gz", "--budget", "75%", "-o", "plan.json"]):  # fmt: skip
        done = memopt(folder, *args)
        assert done.returncode == 0, done.stderr
    return folder


def test_options_may_follow_the_plan(folder: Path) -> None:
    done = memopt(folder, "apply", "plan.json", "--outcome", "after.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "['--lr', '1']"
    outcome = json.loads((folder / "after.json").read_text())
    assert 0 < outcome["measured_peak_bytes"] <= outcome["budget_bytes"] < outcome["unplanned_peak_bytes"]
    assert outcome["actions"]["done"] == outcome["actions"]["planned"] > 0


def test_options_may_precede_the_plan(folder: Path) -> None:
    done = memopt(folder, "apply", "--outcome", "before.json", "plan.json")
    assert done.returncode == 0, done.stderr
    assert (folder / "before.json").exists()


def test_what_follows_two_dashes_is_the_scripts(folder: Path) -> None:
    done = memopt(folder, "apply", "plan.json", "-q", "--", "--outcome", "x", "--", "-q")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "['--outcome', 'x', '--', '-q']"
    assert done.stderr == ""
    assert not (folder / "x").exists()


def test_option_of_the_script_without_dashes_is_refused(folder: Path) -> None:
    done = memopt(folder, "apply", "plan.json", "--lr", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such option '--lr'" in done.stderr


def test_a_run_that_does_not_measure_says_so(folder: Path) -> None:
    done = memopt(folder, "apply", "plan.json", "--no-measure", "--outcome", "bare.json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads((folder / "bare.json").read_text())
    assert (outcome["measured_peak_bytes"], outcome["other_steps"]) == (None, 0)
    assert outcome["measured_step_ms"] > 0
    assert "The peak was not measured." in done.stderr


def test_iterations_unlike_the_profiled_one_are_told(folder: Path) -> None:
    """Batches that grow by a half: as many tensors are saved, but larger ones."""
    grown = SCRIPT.replace("for _ in range(6)", "for step in range(6)").replace(
        "2048", "(2048 if step < 4 else 3072)"
    )
    (folder / "grows.py").write_text(grown)
    for args in (["profile", "-o", "g.json.gz", "grows.py"], ["advise", "g.json.gz", "--budget", "75%", "-o", "g.plan.json"]):  # fmt: skip
        done = memopt(folder, *args)
        assert done.returncode == 0, done.stderr
    done = memopt(folder, "apply", "g.plan.json", "--outcome", "grown.json")
    outcome = json.loads((folder / "grown.json").read_text())
    assert outcome["other_steps"] == 2
    assert any("2 iterations saved other tensors" in note for note in outcome["notes"])
    assert "followed the profile where it could" in done.stderr


def test_ranks_do_not_write_one_outcome(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    done = memopt(folder, "apply", "plan.json", "--outcome", "one.json")
    assert done.returncode == 2
    assert "every rank would write one.json" in done.stderr
    assert "%r" in done.stderr
    assert memopt(folder, "apply", "plan.json", "-q", "--outcome", "of-%r.json").returncode == 0
    assert (folder / "of-1.json").exists()


def test_torch_that_was_searched_for_before_is_watched(folder: Path) -> None:
    """As transformers, datasets and evaluate do."""
    first = "import importlib.util\nassert importlib.util.find_spec('torch') is not None\n"
    (folder / "finds.py").write_text(first + SCRIPT)
    for args in (["profile", "-o", "f.json.gz", "finds.py"], ["advise", "f.json.gz", "--budget", "75%", "-o", "f.plan.json"]):  # fmt: skip
        done = memopt(folder, *args, cold=args[0] == "profile")
        assert done.returncode == 0, done.stderr
    done = memopt(folder, "apply", "f.plan.json", "--outcome", "found.json", cold=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((folder / "found.json").read_text())
    assert outcome["actions"]["done"] == outcome["actions"]["planned"] > 0


def test_a_plan_that_was_moved_without_its_script_says_where_it_looks(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "plan.json").write_bytes((folder / "plan.json").read_bytes())
    done = memopt(folder, "apply", "elsewhere/plan.json")
    assert done.returncode == 2
    assert f"is not in {folder / 'elsewhere'}" in done.stderr
    assert "--cwd DIR" in done.stderr


def test_a_plan_of_which_nothing_is_enforced_is_told(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    plan["script"]["argv"][0] = "other.py"
    (folder / "other.py").write_text(SCRIPT.replace("torch.nn.GELU()", "torch.nn.Tanh()"))
    plan["script"]["sha256"] = hashlib.sha256((folder / "other.py").read_bytes()).hexdigest()
    (folder / "other.plan.json").write_text(json.dumps(plan))
    done = memopt(folder, "apply", "other.plan.json")
    assert done.returncode == 0, done.stderr
    assert "nothing of the plan was enforced: 0 of" in done.stderr
    assert "followed the profile" not in done.stderr
    assert memopt(folder, "apply", "other.plan.json", "--strict", "-q").returncode == 4


def test_a_plan_of_another_ranks_part_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    plan["script"]["rank"] = 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    (folder / "ranks.plan.json").write_text(json.dumps(plan))
    told = "this plan was made from the profile of rank 0, whose part in the run is another"
    assert told not in " ".join(memopt(folder, "apply", "ranks.plan.json").stderr.split()), "it does the same"
    plan["script"]["argv"][0] = "part.py"
    (folder / "part.py").write_text(SCRIPT.replace("range(4)", "range(2)"))
    plan["script"]["sha256"] = hashlib.sha256((folder / "part.py").read_bytes()).hexdigest()
    (folder / "ranks.plan.json").write_text(json.dumps(plan))
    done = memopt(folder, "apply", "ranks.plan.json")
    assert done.returncode == 0, done.stderr
    assert told in " ".join(done.stderr.split())
    assert "memopt apply NAME-%r.plan.json" in done.stderr
