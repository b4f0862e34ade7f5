"""A script that checkpoints by hand is profiled without being disturbed: same losses, whole profile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memopt.trace import load_trace
from tests.support import warm

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "benchmarks" / "train.py"


@pytest.mark.parametrize("model", ["gpt2", "unet"])
def test_checkpointed_model_is_profiled(model: str, tmp_path: Path) -> None:
    script = [str(TRAIN), model, "--scale", "tiny", "--steps", "5", "--checkpoint"]
    profile = tmp_path / "p.json.gz"
    runs = []
    for prefix in ([], ["-m", "memopt", "profile", "--keep-running", "-o", str(profile)]):
        done = warm.python([*prefix, *script], cwd=ROOT)
        assert done.returncode == 0, done.stderr
        runs.append(re.findall(r"loss \S+ (\S+)", done.stdout))
    assert len(runs[0]) == 5
    assert runs[0] == runs[1]
    assert load_trace(profile).partial == ""
