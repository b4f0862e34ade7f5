"""Several strategies at one budget: a row for each, whatever becomes of it, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memopt.advisors.profiles.problem import Decisions
from memopt.advisors.registry import find_strategy
from memopt.cli.advise.words import with_variant
from memopt.cli.main import run
from memopt.device import Device
from memopt.errors import UsageError
from memopt.plan import load_plan
from tests.support.layers_trace import build, chain

MIB = 1 << 20
GPU = Device(kind="cuda", name="a GPU", host_out_bytes_per_s=2e9, host_in_bytes_per_s=2e9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    build(chain([4 * MIB] * 10, [1, 5] * 5), device=GPU).save(tmp_path / "memopt-train.profile.json.gz")
    return tmp_path


def compared(capsys: pytest.CaptureFixture[str], *names: str, budget: str = "70%") -> tuple[int, Any]:
    """Exit code and figures of the comparison."""
    asked = [each for name in names for each in ("--strategy", name)]
    code = run(["advise", "--time-limit", "1", "--budget", budget, "--json", *asked])
    return code, json.loads(capsys.readouterr().out)


def test_one_that_is_not_possible_does_not_end_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    code, figures = compared(capsys, "checkmate", "sublinear", "autotm")
    assert code == 0
    rows = {row["strategy"]: row for row in figures["strategies"]}
    assert [name for name, row in rows.items() if row["feasible"]] == ["sublinear"]
    assert "highspy" in rows["checkmate"]["why_not"]
    assert rows["checkmate"]["predicted_peak_bytes"] is None
    assert load_plan(folder / "memopt-train.plan.json").strategy == "sublinear"


def test_the_table_says_why_one_is_not_possible(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    assert run(["advise", "--budget", "70%", "--strategy", "checkmate", "--strategy", "sublinear"]) == 0
    out = capsys.readouterr().out
    assert "checkmate is not possible here: " in out
    assert "not possible here  " in out


def test_none_that_is_possible(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    code, figures = compared(capsys, "checkmate", "autotm")
    assert code == 1
    assert figures["kind"] == "no plan"
    assert [row["feasible"] for row in figures["strategies"]] == [False, False]
    assert not (folder / "memopt-train.plan.json").exists()


def test_each_tells_its_own_smallest_peak(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, figures = compared(capsys, "sublinear", "capuchin", budget="10%")
    assert code == 3
    peaks = [row["predicted_peak_bytes"] for row in figures["strategies"]]
    assert figures["min_peak_bytes"] == min(peaks)
    assert min(peaks) >= figures["floor_bytes"] > figures["budget_bytes"]
    assert run(["advise", "--budget", "10%", "--strategy", "sublinear", "--strategy", "capuchin"]) == 3
    said = capsys.readouterr()
    assert said.out.count("not met: ") == 2
    assert "cannot be met" in said.err
    # and what it is told to try is enough, however it is rounded
    enough = said.err.rpartition("--budget ")[2].split()[0]
    assert run(["advise", "--budget", enough, "--strategy", "sublinear", "--strategy", "capuchin"]) == 0


def test_advice_has_a_row_and_no_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, figures = compared(capsys, "sublinear", "cdma", "ctdr")
    assert code == 0
    sublinear, cdma, ctdr = figures["strategies"]
    assert (sublinear["advice_only"], cdma["advice_only"]) == (False, True)
    assert cdma["predicted_peak_bytes"] > 0
    assert "ctdr changes the model" in ctdr["why_not"]
    assert ctdr["why_not"].endswith("(try --allow model-change)")
    assert figures["strategy"] == "sublinear"


def test_advice_alone_is_compared_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, figures = compared(capsys, "cdma", "buffer-sharing", budget="200%")
    assert code == 0
    assert [row["feasible"] for row in figures["strategies"]] == [True, True]
    assert not list(folder.glob("*.plan.json"))
    code, figures = compared(capsys, "cdma", "buffer-sharing", budget="5%")
    assert code == 3


def interrupt(*_: Any) -> Decisions:
    raise KeyboardInterrupt


def test_what_was_planned_before_an_interruption_stays(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_strategy("autoswap"), "plans", interrupt)
    code, figures = compared(capsys, "sublinear", "autoswap", "capuchin")
    assert code == 0
    assert [row["strategy"] for row in figures["strategies"]] == ["sublinear"]


def test_an_interruption_before_any_plan_ends_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_strategy("autoswap"), "plans", interrupt)

    def die() -> None:
        raise SystemExit(130)

    monkeypatch.setattr("memopt.cli.main._die_of_interrupt", die)
    with pytest.raises(SystemExit):
        run(["advise", "--budget", "70%", "--strategy", "autoswap", "--strategy", "sublinear"])
    assert not list(folder.glob("*.plan.json"))


@pytest.mark.parametrize(
    ("names", "variant", "found"),
    [
        (("vdnn",), "all", ("vdnn-all",)),
        (("vdnn",), "conv", ("vdnn-conv",)),
        (("vdnn",), "dyn", ("vdnn",)),
        (("vdnn", "auto"), "all", ("vdnn-all", "auto")),
        (("dtr",), "local", ("dtr-local",)),
        (("auto",), None, ("auto",)),
    ],
)
def test_variants(names: tuple[str, ...], variant: str | None, found: tuple[str, ...]) -> None:
    assert with_variant(names, variant) == found


@pytest.mark.parametrize(("names", "variant"), [((), "all"), (("auto",), "all"), (("vdnn",), "most")])
def test_a_variant_that_nobody_has(names: tuple[str, ...], variant: str) -> None:
    with pytest.raises(UsageError, match="has a variant"):
        with_variant(names, variant)


def test_a_variant_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["advise", "--budget", "70%", "--strategy", "vdnn", "--variant", "all"]) == 3
    said = capsys.readouterr().err
    assert "cannot be met" in said
    assert "no plan of vdnn-all was found that lowers it" in said
    assert said.endswith("\n  try: --strategy auto\n")
