"""A compared run never overwrites what the user has: not through Python, not through torch, and not by renaming or removing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memopt.enforcers.verify.own_files import EXIT_CODE, made_beside, overwrites_beside
from tests.support import warm

WATCHED = """
import sys
from pathlib import Path
from memopt.enforcers.verify.own_files import OwnFiles
source, run = map(Path, sys.argv[1:3])
OwnFiles(source, float(sys.argv[3]), run / "digests").install()
own, new = source / "last.pt", source / "new.pt"
exec(sys.argv[4])
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    found = tmp_path / "project"
    (found / "out").mkdir(parents=True)
    (found / "last.pt").write_text("mine")
    (found / "out" / "a").write_text("mine")
    (found / "empty.lock").touch()
    return found


def run(source: Path, code: str, *, since: float = 0.0) -> tuple[int, list[str], list[str]]:
    """The exit code of `code`, the file that it would have overwritten, and those that it has made; `since`: that many seconds from now."""
    folder = source.parent / "run"
    (folder / "copy").mkdir(parents=True)
    began = max(path.stat().st_ctime for path in source.rglob("*")) + 0.001 + since
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(source), str(folder), str(began), code], cwd=folder / "copy", capture_output=True, text=True
    )  # fmt: skip
    named = [path.read_text().splitlines() if path.exists() else [] for path in (overwrites_beside(folder / "x"), made_beside(folder / "x"))]  # fmt: skip
    assert done.returncode in (0, EXIT_CODE), done.stderr
    return done.returncode, named[0], named[1]


@pytest.mark.parametrize(
    "code",
    [
        "open(own, 'w')",
        "open(bytes(own), 'ab')",
        "import os; os.open(own, os.O_RDWR)",
        "sys.audit('open', own, 'w', None)",
        "import os; os.truncate(own, 1)",
        "own.unlink()",
        "own.rename(new)",
        "Path('mine').touch(); Path('mine').replace(own)",
        "Path('link').symlink_to(own); open('link', 'w')",
        "import torch; torch.save(1, own)",
        "from torch import save; save(obj=1, f=str(own))",
    ],
)
def test_a_run_ends_before_it_overwrites_a_file(source: Path, code: str) -> None:
    assert run(source, code)[:2] == (EXIT_CODE, [str(source / "last.pt")])
    assert (source / "last.pt").read_text() == "mine"


def test_a_run_ends_before_it_removes_a_folder(source: Path) -> None:
    assert run(source, "import shutil; shutil.rmtree(own.parent / 'out')")[:2] == (EXIT_CODE, [str(source / "out" / "a")])  # fmt: skip
    assert (source / "out" / "a").exists()


def test_safetensors_are_looked_at(source: Path) -> None:
    pytest.importorskip("safetensors")
    code = "import torch; from safetensors.torch import save_file; save_file({'a': torch.ones(1)}, own)"
    assert run(source, code)[0] == EXIT_CODE


@pytest.mark.parametrize(
    "code",
    [
        "own.read_text()",
        "open(source / 'empty.lock', 'w')",
        "open('here', 'w').write('a'); open('here', 'w')",
        "(source / '__pycache__').mkdir(); (source / '__pycache__' / 'a.pyc').write_bytes(b'a')",
        "print(1, file=open('/dev/null', 'w'))",
    ],
)
def test_what_loses_nothing_goes_on(source: Path, code: str) -> None:
    assert run(source, code) == (0, [], [])


def test_files_that_the_run_has_made_are_its_own_and_are_noted(source: Path) -> None:
    code = "new.write_text('a'); new.write_text('b'); new.unlink(); open(own.parent / 'log', 'w').write('c')"
    assert run(source, code) == (0, [], [str(source / "new.pt"), str(source / "log")])


def test_what_an_earlier_of_the_compared_runs_has_made_may_be_overwritten(source: Path) -> None:
    assert run(source, "own.write_text('a')", since=-10) == (0, [], [])


SAVES = """
import os
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), os.environ["SAVES_TO"])
"""


def test_verify_says_what_the_script_would_overwrite_and_what_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVES_TO", str(tmp_path / "last.pt"))
    (tmp_path / "saves.py").write_text(SAVES)

    def memopt(*words: str) -> tuple[int, str, str]:
        done = warm.python(["-m", "memopt", *words], cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    assert memopt("profile", "-o", "p.json.gz", "saves.py")[0] == 0
    assert memopt("advise", "p.json.gz", "--budget", "80%", "-o", "plan.json")[0] == 0
    own = (tmp_path / "last.pt").read_bytes()
    code, said, why = memopt("apply", "plan.json", "--verify", "2")
    assert (code, said) == (2, "")
    assert f"overwrites {tmp_path / 'last.pt'}" in why
    assert "--in-place" in why
    assert (tmp_path / "last.pt").read_bytes() == own
    monkeypatch.setenv("SAVES_TO", str(tmp_path / "new.pt"))
    code, said, told = memopt("apply", "plan.json", "--verify", "2")
    assert (code, "identical" in said) == (0, True), told
    assert f"1, first {tmp_path / 'new.pt'}" in told
