"""Profiles and plans that are moved with the folder that they lie in, as into a container, still know where their script is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from memopt.cli.shared.own_files import refuse_foreign
from memopt.errors import UsageError
from memopt.plan import load_plan
from memopt.trace import Script, load_trace
from tests.support.enforced import everything, plan_of
from tests.support.toy_trace import toy_trace


@pytest.mark.parametrize(("ran_in", "kept_in"), [("", ""), ("", "plans/a"), ("src/code", "")])
def test_files_are_moved_with_their_folder(ran_in: str, kept_in: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old / ran_in, old / kept_in):
        folder.mkdir(parents=True, exist_ok=True)
    trace = msgspec.structs.replace(toy_trace(), script=Script(argv=["t.py"], cwd=str(old / ran_in)))
    trace.save(old / kept_in / "t.profile")
    plan_of(trace, everything("recompute")).save(old / kept_in / "t.plan.json")
    assert load_trace(old / kept_in / "t.profile") == trace
    assert str(tmp_path) not in (old / kept_in / "t.plan.json").read_text()
    shutil.move(old, new)
    assert load_trace(new / kept_in / "t.profile").script.cwd == str(new / ran_in)
    assert load_plan(new / kept_in / "t.plan.json").script.cwd == str(new / ran_in)


def test_a_plan_that_lies_elsewhere_keeps_its_scripts_folder(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    trace = msgspec.structs.replace(toy_trace(), script=Script(argv=["t.py"], cwd=str(there)))
    plan_of(trace, everything("recompute")).save(here / "t.plan.json")
    assert json.loads((here / "t.plan.json").read_text())["script"]["cwd"] == str(there)
    assert load_plan(here / "t.plan.json").script.cwd == str(there)


def test_an_own_file_is_known_by_its_folder_still(tmp_path: Path) -> None:
    script = Script(argv=["t.py"], cwd=str(tmp_path))
    trace = msgspec.structs.replace(toy_trace(), script=script)
    trace.save(tmp_path / "t.profile")
    refuse_foreign(tmp_path / "t.profile", "memopt.trace", script=script)
    other = msgspec.structs.replace(script, argv=["u.py"])
    with pytest.raises(UsageError):
        refuse_foreign(tmp_path / "t.profile", "memopt.trace", script=other)
