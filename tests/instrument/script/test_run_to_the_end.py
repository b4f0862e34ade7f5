"""However the script ends, whoever ran it has the last word, once, in the process that was asked to run it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUN = """
import os, sys
from memopt.instrument.script.command import Command
from memopt.instrument.script.runner import run_to_the_end
def ended(how):
    print("last word", how, flush=True)
    if os.path.exists("terminated_again"):
        os.kill(os.getpid(), 15)
sys.exit(run_to_the_end(Command(("train.py",)), ended))
"""
"""`torch` is a module of the script's own folder here: nothing is asked of it but to be imported."""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "torch.py").write_text("")
    (folder / "train.py").write_text(
        f"import atexit, os, signal, sys\natexit.register(print, 'hook')\n{script}"
    )
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){RUN}"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("script", "how", "status"),
    [
        ("", 0, 0),
        ("sys.exit(3)", 3, 3),
        ("raise ValueError", 1, 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, -signal.SIGINT),
        ("import torch\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_the_last_word_tells_how_it_ended(tmp_path: Path, script: str, how: int, status: int) -> None:
    done = run(tmp_path, script)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines() == [f"last word {how}", *(["hook"] if how != -signal.SIGTERM else [])]


@pytest.mark.parametrize("script", ["", "import torch\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)"])
def test_a_script_that_has_not_begun_or_takes_the_signal_back_dies_of_it_at_once(tmp_path: Path, script: str) -> None:  # fmt: skip
    done = run(tmp_path, f"{script}\nos.kill(os.getpid(), signal.SIGTERM)")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_a_handler_of_the_scripts_own_stands(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nimport torch\nos.kill(os.getpid(), signal.SIGTERM)"  # fmt: skip
    done = run(tmp_path, script)
    assert (done.returncode, done.stdout) == (5, "last word 5\nhook\n"), done.stderr


def test_a_signal_while_it_is_said_does_not_have_it_said_again(tmp_path: Path) -> None:
    (tmp_path / "terminated_again").touch()
    done = run(tmp_path, "import torch")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "last word 0\n"), done.stderr


@pytest.mark.parametrize(
    ("end", "status"),
    [("sys.exit(4)", 4), ("os.kill(os.getpid(), signal.SIGINT)", -2), ("os.kill(os.getpid(), signal.SIGTERM)", -15)],
)  # fmt: skip
def test_a_forked_child_ends_as_under_python_and_says_nothing(tmp_path: Path, end: str, status: int) -> None:
    script = f"""
import torch
child = os.fork()
if not child:
    {end}
_, ended = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(ended), flush=True)
"""
    done = run(tmp_path, script)
    hooks = ["hook"] if status != -15 else []
    assert done.stdout.splitlines() == [*hooks, f"child {status}", "last word 0", "hook"], done.stderr
