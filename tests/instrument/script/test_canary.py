"""A script cannot tell memopt's runner from `python`: same world, same output, same end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import warm

ROOT = Path(__file__).parents[3]
CANARY = ROOT / "tests" / "support" / "canary.py"
ENDINGS = ("exit", "message", "raise", "hard", "sigint", "sigterm", "sigterm-handled")


@dataclass(frozen=True, slots=True)
class World:
    """What a run of the canary left behind."""

    returncode: int
    stdout: str
    notes: list[dict[str, object]]
    stderr: str


def run(prefix: Sequence[str], folder: Path, out: Path, *args: str) -> World:
    out.unlink(missing_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEMOPT_")}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *prefix, *([str(out)] if "--" not in prefix else []), *args],
        capture_output=True, text=True, input="typed\n", cwd=folder, env=env, timeout=120,
    )  # fmt: skip
    notes = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return World(done.returncode, done.stdout, notes, done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the canary as a script, and as a module of a package."""
    folder = tmp_path_factory.mktemp("canary")
    shutil.copy(CANARY, folder / "canary.py")
    (folder / "birds").mkdir()
    (folder / "birds" / "__init__.py").write_text("")
    shutil.copy(CANARY, folder / "birds" / "canary.py")
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> World:
    """The world as `python canary.py` shows it."""
    world = run(["canary.py"], folder, folder / "out.jsonl", "world", "--flag", "-x", "--", "-o", "y")
    assert world.returncode == 0, world.stderr
    assert len(world.notes) == 9
    return world


RUNNER_ALONE = """
import sys
from memopt.instrument.script.command import Command
from memopt.instrument.script.runner import run_to_the_end
sys.exit(run_to_the_end(Command(tuple(sys.argv[1:])), lambda how: None))
"""


def test_runner_alone_shows_the_same_world(folder: Path, plain: World) -> None:
    prefix = ["-c", RUNNER_ALONE, "canary.py"]
    seen = run(prefix, folder, folder / "out.jsonl", "world", "--flag", "-x", "--", "-o", "y")
    assert (seen.returncode, seen.stdout, seen.notes) == (plain.returncode, plain.stdout, plain.notes), (
        seen.stderr
    )


@pytest.mark.parametrize("mode", ENDINGS)
def test_same_end_under_runner_alone(folder: Path, mode: str) -> None:
    out = folder / f"{mode}.jsonl"
    assert_same_end(
        run(["canary.py"], folder, out, mode), run(["-c", RUNNER_ALONE, "canary.py"], folder, out, mode)
    )


def memopt(*args: str) -> list[str]:
    return ["-m", "memopt", *args]


@pytest.fixture(scope="module")
def plan(folder: Path) -> Path:
    """A plan for the canary, made by the commands that a person would type."""
    profile, plan = folder / "canary.profile.json.gz", folder / "canary.plan.json"
    for command in (
        memopt("profile", "-o", str(profile), "canary.py", str(folder / "ignored.jsonl"), "world"),
        memopt("advise", str(profile), "--budget", "90%", "-o", str(plan)),
    ):
        done = warm.python(command, cwd=folder)
        assert done.returncode == 0, done.stderr
    return plan


def test_profile_shows_the_same_world(folder: Path, plain: World) -> None:
    prefix = memopt("profile", "--keep-running", "-f", "-o", "p.json.gz", "canary.py")
    seen = run(prefix, folder, folder / "out.jsonl", "world", "--flag", "-x", "--", "-o", "y")
    assert (seen.returncode, seen.stdout) == (plain.returncode, plain.stdout), seen.stderr
    assert seen.notes == plain.notes
    assert (folder / "p.json.gz").exists()


def test_apply_shows_the_same_world(folder: Path, plain: World, plan: Path) -> None:
    out = folder / "out.jsonl"
    seen = run(
        memopt("apply", str(plan), "--", str(out)), folder, out, "world", "--flag", "-x", "--", "-o", "y"
    )
    assert (seen.returncode, seen.stdout) == (plain.returncode, plain.stdout), seen.stderr
    assert seen.notes == plain.notes


def test_module_form(folder: Path) -> None:
    out = folder / "out.jsonl"
    expected = run(["-m", "birds.canary"], folder, out, "world", "-m", "z")
    seen = run(memopt("profile", "--keep-running", "-f", "-o", "m.json.gz", "-m", "birds.canary"), folder, out, "world", "-m", "z")  # fmt: skip
    assert expected.returncode == 0, expected.stderr
    assert expected.notes[0]["spec"] == "birds.canary"
    assert (seen.returncode, seen.stdout, seen.notes) == (
        expected.returncode,
        expected.stdout,
        expected.notes,
    )


@pytest.mark.parametrize("mode", ENDINGS)
def test_same_end_under_profile(folder: Path, mode: str) -> None:
    out = folder / f"{mode}.jsonl"
    expected = run(["canary.py"], folder, out, mode)
    seen = run(
        memopt("profile", "--keep-running", "-f", "-o", f"{mode}.json.gz", "canary.py"), folder, out, mode
    )
    assert_same_end(expected, seen)


@pytest.mark.parametrize("mode", ["exit", "raise", "sigint", "sigterm"])
def test_same_end_under_apply(folder: Path, plan: Path, mode: str) -> None:
    out = folder / f"{mode}.jsonl"
    expected = run(["canary.py"], folder, out, mode)
    seen = run(memopt("apply", str(plan), "--", str(out)), folder, out, mode)
    assert_same_end(expected, seen)


def assert_same_end(expected: World, seen: World) -> None:
    assert seen.returncode == expected.returncode, seen.stderr
    assert (seen.stdout, seen.notes) == (expected.stdout, expected.notes)
    assert expected.stderr.strip() in seen.stderr
    assert f'File "{ROOT}' not in seen.stderr, "a frame of memopt shows in the script's traceback"
    assert "<frozen runpy>" not in seen.stderr
