"""What a command reads is what its request holds, and asking changes nothing outside of the command."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from memopt.cli import requests
from memopt.cli.main import run
from memopt.cli.table import load

REQUESTS = {
    "profile": requests.ProfileRequest,
    "apply": requests.ApplyRequest,
    "run": requests.RunRequest,
    "advise": requests.AdviseRequest,
    "estimate": requests.EstimateRequest,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_a_field_for_each_parameter_of_its_command(name: str) -> None:
    read = {parameter.name for parameter in load(name).params if not parameter.is_eager}
    assert {field.name for field in dataclasses.fields(REQUESTS[name])} == read


@pytest.mark.parametrize("kind", REQUESTS.values())
def test_a_request_is_frozen_and_told_by_name(kind: type) -> None:
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(field.kw_only for field in dataclasses.fields(kind))


def test_a_calibration_that_is_named_is_read_and_stays_out_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMOPT_CALIBRATION", "")
    (tmp_path / "script.py").write_text("")
    nowhere = str(tmp_path / "nowhere.json")
    before = dict(os.environ)
    assert run(["estimate", "--calibration", nowhere, str(tmp_path / "script.py")]) != 0
    assert nowhere in capsys.readouterr().err
    assert dict(os.environ) == before
