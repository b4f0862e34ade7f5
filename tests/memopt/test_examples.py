"""The examples train: losses finite, the same twice under one seed, and lower than at the start."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.cli.test_apply_cli import ROOT, memopt
from tests.support import warm

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

SMALL = {
    "char_gpt.py": ["--batch", "4", "--context", "32"],
    "dcgan.py": ["--batch", "16", "--width", "8"],
    "lstm.py": ["--batch", "16", "--length", "24", "--hidden", "32"],
    "resnet.py": ["--batch", "16", "--pixels", "24"],
    "unet.py": ["--batch", "4", "--pixels", "48"],
    "vit_amp.py": ["--batch", "8", "--pixels", "32"],
}


TWICE = """
import runpy, sys
sys.argv = sys.argv[1:]
for _ in range(2):
    runpy.run_path(sys.argv[0], run_name="__main__")
    print("== end of run ==")
"""


def run_twice(script: Path, *args: str) -> list[str]:
    done = warm.python(["-c", TWICE, str(script), *args], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("== end of run ==\n")[:2]


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step \d+ loss (\S+)", output, re.MULTILINE)]


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES} == set(SMALL)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains_and_repeats(script: Path) -> None:
    first, second = run_twice(script, "--steps", "6", *SMALL[script.name])
    values = losses(first)
    assert len(values) == 6
    assert all(math.isfinite(value) for value in values)
    if script.name != "vit_amp.py":  # bf16 noise outweighs six tiny steps; longer runs do learn
        assert min(values[1:]) < values[0]
    assert first == second


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 100


@pytest.mark.parametrize(
    ("name", "size"),
    [("char_gpt", ("--batch", "8", "--context", "64")), ("dcgan", ("--batch", "32", "--width", "16"))],
)
def test_an_example_keeps_to_60_percent_of_its_peak_and_to_its_bits(
    name: str, size: tuple[str, ...], tmp_path: Path
) -> None:
    """The main job, as a person does it: a script with one optimizer, one with two. How fast a disk is does not matter here."""
    steps = [str(ROOT / "examples" / f"{name}.py"), "--steps", "6", *size]
    for args in (
        ["profile", "-q", "-o", "p.json.gz", *steps],
        ["advise", "p.json.gz", "--budget", "60%", "--deny", "swap", "--time-limit", "1", "-o", "plan.json"],
        ["apply", "plan.json", "--outcome", "outcome.json"],
    ):
        done = memopt(tmp_path, *args)
        assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["measured_peak_bytes"] <= outcome["budget_bytes"]
    assert outcome["measured_peak_bytes"] == pytest.approx(outcome["predicted_peak_bytes"], rel=0.03)
    assert outcome["actions"]["done"] == outcome["actions"]["planned"] > 0
    verified = memopt(tmp_path, "apply", "plan.json", "--verify", "3")
    assert verified.returncode == 0, verified.stderr
    assert "identical" in verified.stdout
