"""What follows memopt's own options: a script, or the whole command that a person had typed before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memopt.cli.shared import as_typed
from memopt.cli.shared.as_typed import command_as_typed
from memopt.errors import UsageError
from tests.cli.test_newcomer import TRAIN

OURS = sys.executable


class Replaced(Exception):
    """Another program took the place of this process."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, and memopt's Python first on PATH."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(OURS).parent), prepend=":")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "argv", "as_module"),
    [
        ("train.py --lr 1", ("train.py", "--lr", "1"), False),
        ("python train.py --lr 1", ("train.py", "--lr", "1"), False),
        ("python3 -m pkg.train -m 2", ("pkg.train", "-m", "2"), True),
        (f"{OURS} train.py", ("train.py",), False),
        ("no.py python", ("no.py", "python"), False),
        ("torchrunner train.py", ("torchrunner", "train.py"), False),
        ("accelerate config", (str(Path(OURS).with_name("accelerate")), "config"), False),
    ],
)
def test_a_script_is_run_with_python_before_it_or_without(
    folder: Path, typed: str, argv: tuple[str, ...], as_module: bool
) -> None:
    program = Path(OURS).with_name("accelerate")
    if typed.startswith("accelerate") and not program.exists():
        pytest.skip("no program of that name is installed")
    command = command_as_typed(typed.split(), as_module=False)
    assert (command.argv, command.as_module) == (argv, as_module)


def test_a_program_on_the_path_is_a_script_if_it_is_of_this_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "bin").mkdir()
    monkeypatch.setenv("PATH", str(folder / "bin"))
    for name, first in (("ours", f"#!{OURS}"), ("other", "#!/bin/sh")):
        (folder / "bin" / name).write_text(f"{first}\n")
        (folder / "bin" / name).chmod(0o755)
    assert command_as_typed(["ours", "1"], as_module=False).argv == (str(folder / "bin" / "ours"), "1")
    assert command_as_typed(["other"], as_module=False).argv == ("other",)
    (folder / "ours").write_text("")
    assert command_as_typed(["ours"], as_module=False).argv == ("ours",), "the file here comes first"


def test_a_file_that_is_called_python_is_a_script(folder: Path) -> None:
    (folder / "python").write_text("")
    assert command_as_typed(["python", "train.py"], as_module=False).argv == ("python", "train.py")


def test_u_writes_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; from memopt.cli.shared.as_typed import command_as_typed as c\n"
    code += "print(c(sys.argv[1:], as_module=False).argv, sys.stdout.write_through)"
    done = subprocess.run(
        [OURS, "-c", code, OURS, "-u", "train.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "('train.py',) True\n"


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("python", "a script is needed, or -m and a module"),
        ("python -c 1", "a script is needed, or -m and a module"),
        ("python -m", "a script is needed, or -m and a module"),
        ("python -O train.py", "-O is an option of python's own"),
        ("torchrun --nproc-per-node 2", "no word after it is the path of a Python script"),
    ],
)
def test_what_cannot_be_run_is_told(folder: Path, typed: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        command_as_typed(typed.split(), as_module=False)


def test_a_python_that_is_not_memopts_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have other libraries."""
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text("#!/bin/sh\n")
    (folder / "bin" / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    with pytest.raises(UsageError, match=f"python is {folder}/bin/python, and memopt belongs to {OURS}"):
        command_as_typed(["python", "train.py"], as_module=False)


@pytest.mark.parametrize(
    ("typed", "starts"),
    [
        ("torchrun --nproc-per-node 2 train.py 7", "-m torch.distributed.run --nproc-per-node 2 -m memopt {} train.py 7"),
        ("torchrun --standalone -m pkg.train 7", "-m torch.distributed.run --standalone -m memopt {} -m pkg.train 7"),
        ("python -m torch.distributed.launch train.py", "-m torch.distributed.launch -m memopt {} train.py"),
        ("-m torch.distributed.run train.py", "-m torch.distributed.run -m memopt {} train.py"),
        ("accelerate launch --cpu train.py", "-m accelerate.commands.launch --cpu -m memopt {} train.py"),
        ("accelerate-launch --cpu train.py", "-m accelerate.commands.launch --cpu -m memopt {} train.py"),
    ],
)  # fmt: skip
def test_a_launcher_is_started_with_memopt_in_each_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, typed: str, starts: str
) -> None:
    started: list[list[str]] = []

    def become(program: str, words: list[str]) -> None:
        started.append(words)
        raise Replaced

    words = typed.split()
    own = "run --budget 60%"
    monkeypatch.setattr(sys, "argv", ["memopt", *own.split(), *words])
    monkeypatch.setattr(as_typed.os, "execv", become)
    as_module = words[0] == "-m"
    with pytest.raises(Replaced):
        command_as_typed(words[1:] if as_module else words, as_module=as_module)
    assert started == [[OURS, *starts.format(own).split()]]


@pytest.mark.slow
def test_torchrun_behind_memopt_is_memopt_behind_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "4"]
    done = subprocess.run(
        [OURS, "-m", "memopt", "profile", "-o", "p-%r.profile.json.gz", *torchrun], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "memopt: starting python -m torch.distributed.run" in done.stderr
    assert {each.name for each in tmp_path.glob("p-*")} == {"p-0.profile.json.gz", "p-1.profile.json.gz"}
