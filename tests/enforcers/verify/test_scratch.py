"""Copies of a script's folder: what is written in a copy never reaches the folder itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.enforcers.verify.scratch import copy_folder, moved, script_as_seen_from_a_copy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "project"
    (found / "runs1").mkdir(parents=True)
    (found / "epoch3.pt").write_text("three")
    (tmp_path / "elsewhere.txt").write_text("far")
    return found


@pytest.mark.parametrize("absolute", [False, True])
def test_links_into_the_folder_lead_into_the_copy(folder: Path, tmp_path: Path, absolute: bool) -> None:
    (folder / "last.pt").symlink_to(folder / "epoch3.pt" if absolute else "epoch3.pt")
    (folder / "latest").symlink_to(folder / "runs1" if absolute else "runs1")
    (folder / "far").symlink_to(tmp_path / "elsewhere.txt" if absolute else "../elsewhere.txt")
    copy = tmp_path / "scratch" / "project"
    copy_folder(folder, copy)
    (copy / "last.pt").write_text("four")
    (copy / "latest" / "log").write_text("new")
    assert (folder / "epoch3.pt").read_text() == "three"
    assert not (folder / "runs1" / "log").exists()
    assert (copy / "epoch3.pt").read_text() == "four"
    assert (copy / "runs1" / "log").read_text() == "new"
    assert (copy / "far").read_text() == "far"


def test_a_copy_may_be_made_inside_the_folder(folder: Path) -> None:
    copy = folder / "tmp" / "verify" / "project"
    copy.parent.mkdir(parents=True)
    copy_folder(folder, copy)
    assert sorted(path.name for path in copy.iterdir()) == ["epoch3.pt", "runs1"]


def test_words_that_name_something_in_the_folder_name_its_copy() -> None:
    source, target = Path("/home/me/project"), Path("/tmp/x/project")
    assert moved("/home/me/project/ckpt/a", source, target) == "/tmp/x/project/ckpt/a"
    assert moved("--out=/home/me/project/ckpt", source, target) == "--out=/tmp/x/project/ckpt"
    for word in (
        "relative/a",
        "/home/me/projects/b",
        "--lr=0.1",
        "a=/home/me/project/c",
        "/home/me/project/../b",
    ):
        assert moved(word, source, target) == word


def test_a_script_beside_the_folder_is_found_from_the_copy() -> None:
    source = Path("/home/me/project")
    assert script_as_seen_from_a_copy("../other/train.py", source) == "/home/me/other/train.py"
    assert script_as_seen_from_a_copy("a/../../train.py", source) == "/home/me/train.py"
    assert script_as_seen_from_a_copy("../project/train.py", source) == "/home/me/project/train.py"
    for inside in ("train.py", "a/train.py", "package.module", "/home/me/project/train.py"):
        assert script_as_seen_from_a_copy(inside, source) == inside
