"""The wheel holds every package and nothing else, and works where the user has modules of the same names as our rooms."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import man_pages

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("advisors", "cli", "enforcers", "estimators", "instrument", "profiler", "reports")
TRAINERS = ("transformers", "lightning")


def modules() -> set[str]:
    """Every module of the package, as a path inside `memopt/`."""
    rooms = {
        f"memopt/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }
    return rooms | {path.relative_to(ROOT).as_posix() for path in (ROOT / "memopt").rglob("*.py")}


def test_every_package_is_declared() -> None:
    found = {
        ".".join(("memopt", *folder.relative_to(ROOT / "memopt" if room == "memopt" else ROOT).parts))
        for room in ("memopt", *ROOMS)
        for folder in {path.parent for path in (ROOT / room).rglob("*.py")}
    }
    declared = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(found) == declared


def test_rooms_are_mapped_to_their_folders() -> None:
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {f"memopt.{room}": room for room in ROOMS}


def test_constraints_pin_every_dependency() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *PYPROJECT["dependency-groups"]["dev"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {requirement.partition(">")[0].partition("[")[0].strip().lower() for requirement in wanted}
    assert names <= pinned


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "share", "memopt", *ROOMS):
        (source / name).symlink_to(ROOT / name)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    code = {name for name in names if name.endswith(".py")}
    assert code == modules()
    rest = {name for name in names - code if ".dist-info/" not in name and ".data/data/share/" not in name}
    assert "memopt/py.typed" in rest
    assert all(name == "memopt/py.typed" or "/data/" in name or "/templates/" in name for name in rest)
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_holds_every_data_file(wheel: Path) -> None:
    files = {path for room in ("memopt", *ROOMS) for path in (ROOT / room).rglob("*") if path.is_file()}
    data = {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts}
    names = {path.relative_to(ROOT).as_posix() for path in data}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert "memopt/py.typed" in names
    assert {name if name.startswith("memopt/") else f"memopt/{name}" for name in names} <= held


def test_wheel_holds_the_manual_and_the_completions(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {
            name.partition(".data/data/share/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".data/data/share/" in name
        }
    assert held == man_pages.pages(), "make docs"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # a plain line in a .pth is only a folder on the path: this environment's own hooks (an editable memopt) stay asleep
    (folder / "lib" / version / "site-packages" / "borrowed.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )
    return python


@pytest.fixture(scope="module")
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of somebody who has a `cli.py` and a `profiler.py` of their own."""
    folder = tmp_path_factory.mktemp("user")
    for room in ROOMS:
        (folder / f"{room}.py").write_text(f"OWNER = 'the user of {room}'\n")
    return folder


def in_users_folder(python: Path, folder: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([python, *args], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _trainer_is_here(path: str) -> bool:
    """A callback is for a library that only the group `trainers` installs."""
    folder, _, name = path.removesuffix(".py").rpartition("/")
    return folder != "memopt/integrations" or name not in TRAINERS or find_spec(name) is not None


def test_every_module_can_be_imported_from_the_wheel(installed: Path, users_folder: Path) -> None:
    names = sorted(
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in modules()
        if not path.endswith("__main__.py") and _trainer_is_here(path)
    )
    code = f"""
import importlib, memopt
assert {str(ROOT)!r} not in memopt.__file__, memopt.__file__
for name in {names!r}:
    module = importlib.import_module(name)
    assert "site-packages" in module.__file__, module.__file__
"""
    in_users_folder(installed, users_folder, "-c", code)


def test_the_users_own_modules_win(installed: Path, users_folder: Path) -> None:
    code = f"""
import memopt.cli.main, importlib
for room in {ROOMS!r}:
    assert importlib.import_module(room).OWNER == f"the user of {{room}}"
"""
    in_users_folder(installed, users_folder, "-c", code)


def test_console_script_and_module_form(installed: Path, users_folder: Path) -> None:
    assert "Usage: memopt" in in_users_folder(installed.parent / "memopt", users_folder, "--help")
    assert "Usage: memopt" in in_users_folder(installed, users_folder, "-m", "memopt", "--help")


def test_what_is_installed_is_found_by_man_and_by_the_shells(installed: Path) -> None:
    share = installed.parent.parent / "share"
    assert {path.relative_to(share).as_posix() for path in share.rglob("*") if path.is_file()} >= set(
        man_pages.pages()
    )


def test_checkout_works_without_being_installed(users_folder: Path) -> None:
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import cli, memopt.cli.main; print(cli.OWNER)"
    assert in_users_folder(Path(sys.executable), users_folder, "-c", code) == "the user of cli\n"
