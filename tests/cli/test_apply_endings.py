"""What `memopt apply` says and gives back when the machine, the plan or the script is not as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_apply_cli import ROOT, memopt
from tests.cli.test_apply_cli import folder as folder  # its plan
from tests.support import warm

SCRIPTS = ROOT / "tests" / "scripts"


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> str:
    """A copy of the folder's plan that `change` was made to."""
    plan = json.loads((folder / "plan.json").read_text())
    change(plan)
    (folder / name).write_text(json.dumps(plan))
    return name


def planned(folder: Path, script: str, *advice: str) -> str:
    """The name of a plan for `script`, which is copied there."""
    shutil.copy(SCRIPTS / script, folder)
    stem = script.removesuffix(".py")
    for args in (
        ["profile", "-q", "-f", "-o", f"{stem}.gz", script],
        ["advise", f"{stem}.gz", "-f", "-o", f"{stem}.json", *advice],
    ):
        done = memopt(folder, *args)
        assert done.returncode == 0, done.stderr
    return f"{stem}.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: plan["script"].update(cwd="/a\0b"), "zero byte"),
        (lambda plan: plan["script"]["argv"].append("\0"), "zero byte"),
        (lambda plan: plan["actions"][0].update(kind="compress", codec="gzip"), "no codec 'gzip'"),
        (lambda plan: plan["actions"][0].update(kind="drop", codec=""), "no codec ''"),
        (
            lambda plan: [
                plan["actions"][0].update(kind="drop", codec="nothing"),
                plan["actions"][0]["slots"][0].update(need="luck"),
            ],
            "no backward needs 'luck'",
        ),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused_before_anything_runs(
    folder: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    done = memopt(folder, "apply", edited(folder, "odd.json", change))
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_that_drops_what_is_read_keeps_it(folder: Path) -> None:
    """It was edited: no backward of a linear layer or a GELU does without its input."""

    def drop_all(plan: dict[str, Any]) -> None:
        for action in plan["actions"]:
            action.update(kind="drop", codec="nothing")
            for slot in action["slots"]:
                slot.update(need="nothing", params={"stand_in": "empty"})

    plain = memopt(folder, "apply", edited(folder, "none.json", lambda plan: plan.update(actions=[])))
    done = memopt(folder, "apply", edited(folder, "drops.json", drop_all), "--outcome", "drops.out", "-f")
    assert done.stdout == plain.stdout
    counts = json.loads((folder / "drops.out").read_text())["actions"]
    assert (counts["done"], counts["skipped"]) == (0, counts["planned"])
    verified = memopt(folder, "apply", "drops.json", "--verify", "2")
    assert verified.returncode == 1
    assert "none of the plan's actions was taken" in verified.stderr
    assert "was not called as in the profile" in verified.stderr


def test_verify_counts_what_it_verified(folder: Path) -> None:
    done = memopt(folder, "apply", "plan.json", "--verify", "9", "--outcome", "verify.json")
    assert done.returncode == 0
    assert "of 6 iterations, bit for bit" in done.stdout
    assert "ended by itself after 6 of 9 iterations, with exit code 0" in done.stderr
    counts = json.loads((folder / "verify.json").read_text())["actions"]
    assert f"{counts['done']} of {counts['planned']} actions were taken" in done.stderr
    assert counts["done"] == counts["planned"] > 0


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(), reason="there is a GPU")
def test_what_needs_a_gpu_is_refused_without_one(folder: Path) -> None:
    plan = edited(folder, "gpu.json", lambda plan: plan["device"].update(kind="cuda", name="RTX 4090"))
    for args in (["apply", plan], ["profile", "--device", "cuda", "train.py"]):
        done = memopt(folder, *args)
        assert (done.returncode, done.stdout) == (1, "")
        assert "no driver of a CUDA or ROCm device" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_outcome_that_cannot_be_written_is_told_and_the_script_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        (SCRIPTS / "keeps_more.py").read_text() + "import os; os.rmdir('gone')\nprint('end')\n"
    )
    for args in (
        ["profile", "-q", "-o", "p.gz", "train.py"],
        ["advise", "p.gz", "--budget", "100%", "-o", "plan.json"],
    ):
        (tmp_path / "gone").mkdir(exist_ok=True)
        assert memopt(tmp_path, *args).returncode == 0
    done = memopt(tmp_path, "apply", "plan.json", "--outcome", "gone/outcome.json")
    assert (done.returncode, done.stdout) == (70, "end\n")
    assert "memopt: cannot write" in done.stderr
    assert "predicted" in done.stderr


def test_what_the_script_keeps_since_it_was_profiled_is_told(tmp_path: Path) -> None:
    plan = planned(tmp_path, "keeps_more.py", "--budget", "100%")
    done = memopt(tmp_path, "apply", plan, "--outcome", "outcome.json")
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["measured_peak_bytes"] - outcome["predicted_peak_bytes"] == 2**22
    assert "began with 4.00 MiB more than the profiled one" in done.stderr


def test_forked_children_end_their_own_way(tmp_path: Path) -> None:
    plan = planned(tmp_path, "forks.py", "--budget", "100%")
    done = memopt(tmp_path, "apply", plan)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "child ended with 6\nchild ended with 6\nparent\n"


def test_a_swap_file_that_cannot_grow_is_told_and_what_should_go_there_is_kept(folder: Path) -> None:
    def swap_all(plan: dict[str, Any]) -> None:
        for action in plan["actions"]:
            action.update(kind="swap", tier="disk")

    edited(folder, "swap.json", swap_all)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))"
    then = "from memopt.cli.main import main; main()"
    limited = warm.python(
        ["-c", f"{limit}; {then}", "apply", "swap.json", "--outcome", "swap.out"], cwd=folder
    )
    assert limited.returncode == 0
    assert limited.stdout == memopt(folder, "apply", "plan.json", "-q").stdout
    assert "what could not be copied was kept" in limited.stderr
    counts = json.loads((folder / "swap.out").read_text())["actions"]
    assert (counts["done"], counts["skipped"]) == (0, counts["planned"])
