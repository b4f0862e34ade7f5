"""Warnings of memopt's own looks are not told; those of the script are told as often as under plain python."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from memopt.instrument.script.unheard import unheard

_WARNS = """
import warnings
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.GELU())
optimizer = torch.optim.Adam(model.parameters())
for step in range(8):
    warnings.warn("said once")
    model(torch.randn(500, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_warning_is_not_told_and_does_not_raise() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unheard():
            warnings.warn("of a look", stacklevel=1)
        with pytest.raises(UserWarning, match="of the script"):
            warnings.warn("of the script", stacklevel=1)


def test_filters_that_are_set_in_between_stay() -> None:
    with warnings.catch_warnings():
        before = list(warnings.filters)
        with unheard():
            warnings.simplefilter("error", BytesWarning)
        assert warnings.filters == [("error", None, BytesWarning, None, 0), *before]


def test_what_was_told_is_not_told_again_after_a_look() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("once", stacklevel=1)
            with unheard():
                pass
    assert len(told) == 1


@pytest.mark.parametrize("command", [("run", "--budget", "60%"), ("profile",)])
def test_a_warning_of_every_step_is_told_once(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WARNS)
    ended = subprocess.run(
        [sys.executable, "-m", "memopt", *command, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr.count("UserWarning: said once") == 1, ended.stderr
