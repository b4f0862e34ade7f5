"""`apply --verify` where a script does not repeat by itself: that is said first, and the plan is judged beside the spread."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memopt.enforcers.verify import child, compare
from memopt.enforcers.verify.digests import Digests
from memopt.enforcers.verify.spread import beside_the_spread
from memopt.errors import VerifyFailed


def run_of(*losses: float) -> list[dict[str, Any]]:
    return [
        {"losses": {"loss 0": loss.hex()}, "values": {"loss 0": loss}, "gradients": {}, "parameters and buffers": {}}
        for loss in losses
    ]  # fmt: skip


def test_within_and_outside_of_the_spread() -> None:
    plains = [run_of(1.0, 2.0), run_of(1.0, 2.2), run_of(1.0, 2.1)]
    within = beside_the_spread(run_of(1.0, 2.15), plains)
    assert "are within the plain runs' spread (2.3e-02 away, plain runs 9.1e-02 apart)" in within
    assert "are outside of" in beside_the_spread(run_of(2.0, 2.15), plains)
    assert "are outside of" in beside_the_spread(run_of(1.0, math.nan), plains)


def verified(monkeypatch: pytest.MonkeyPatch, plain: list[float], enforced: list[float]) -> VerifyFailed:
    """What is said where the plain runs, and the enforced ones, have these losses one after the other."""
    runs = {"plain": iter(plain), "enforced": iter(enforced)}
    monkeypatch.setattr(compare._Runs, "run", lambda self, way, _: (run_of(next(runs[way])), 0, None))
    with pytest.raises(VerifyFailed) as caught:
        compare.verify(Path("p"), [], 1, Path("."))
    return caught.value


def test_a_script_that_does_not_repeat_is_told_first_and_the_plan_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = verified(monkeypatch, plain=[1.0, 1.2, 1.1], enforced=[1.15])
    assert told.what == "the runs differ, but so do two plain runs: the script does not repeat by itself"
    assert told.why is not None
    assert "are within the plain runs' spread" in told.why


def test_a_plan_that_does_not_repeat_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told = verified(monkeypatch, plain=[1.0, 1.0, 1.0], enforced=[1.15, 1.3])
    assert "so do two enforced runs" in told.what
    assert told.why is not None
    assert "are outside of the plain runs' spread" in told.why


def test_a_plan_that_differs_where_all_repeat_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = verified(monkeypatch, plain=[1.0, 1.0, 1.0], enforced=[1.15, 1.15])
    assert told.what == "the enforced run differs from the plain one"


def test_the_values_of_losses_are_written_beside_their_digests(tmp_path: Path) -> None:
    digests = Digests(tmp_path / "digests", 2)
    roots = (torch.tensor(0.5), torch.ones(2), torch.tensor(1j))
    digests.backward_begins(roots, keep_graph=False, create_graph=False)
    assert len(digests._losses) == 3
    assert digests._values == {"loss 0": 0.5}
    digests._file.close()


@pytest.mark.parametrize("mode", ["plain", "plain-deterministic"])
def test_both_runs_use_deterministic_algorithms_where_that_is_asked_for(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool, str | None]] = []

    def run(command: object) -> int:
        on = torch.are_deterministic_algorithms_enabled()
        seen.append((on, torch.backends.cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return 0

    # torch.testing, which tests of samples import, forbids to set flags in its process
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(child, "load_plan", lambda path: SimpleNamespace(optimizers=1))
    monkeypatch.setattr(child, "command_of", lambda plan, argv: None)
    monkeypatch.setattr(child, "Digests", lambda out, steps: SimpleNamespace(install=lambda optimizers: None))  # fmt: skip
    monkeypatch.setattr(child, "run", run)
    monkeypatch.setattr("sys.argv", ["verify", "plan.json", mode, "3", str(tmp_path / "out"), ".", "", "0"])
    try:
        with pytest.raises(SystemExit):
            child.child()
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert seen == [(True, False, ":16:8") if mode.endswith("deterministic") else (False, True, None)]
