"""Scripts that train in processes of their own: the first that trains is profiled, each runs under the plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from memopt.instrument.script.children import Children, is_first
from memopt.trace import load_trace
from tests.support import warm

SCRIPT = Path(__file__).parents[1] / "scripts" / "hogwild.py"


def _memopt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    ran = warm.python(["-m", "memopt", *words], cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_the_first_process_that_trains_is_profiled_and_all_are_enforced(how: str, tmp_path: Path) -> None:
    profiled = _memopt(tmp_path, "profile", "-o", "h.profile", str(SCRIPT), how)
    assert profiled.stdout == "[0, 0]\n"
    assert "memopt: wrote h.profile" in profiled.stderr
    trace = load_trace(tmp_path / "h.profile")
    assert (trace.partial, trace.iteration) == ("", 3)
    assert any(trace.op_name(op).startswith("aten.gelu_backward") for op in range(trace.op_count))
    _memopt(tmp_path, "advise", "h.profile", "--budget", "min", "-o", "h.plan.json")
    applied = _memopt(tmp_path, "apply", "h.plan.json", "--outcome", "o.json", "--cwd", ".")
    assert applied.stdout == "[0, 0]\n"
    outcome = json.loads((tmp_path / "o.json").read_text())
    assert outcome["steps"] == 5
    assert outcome["actions"]["done"] == outcome["actions"]["planned"] > 0


def test_workers_of_data_loaders_are_let_be() -> None:
    from multiprocessing.process import BaseProcess

    from torch.utils.data._utils.worker import _worker_loop

    started = []
    original = BaseProcess.start
    try:
        BaseProcess.start = started.append
        children = Children(None, wanted=lambda: True)
        children.install()
        process = BaseProcess.__new__(BaseProcess)
        process._target = _worker_loop
        process.start()
        assert [each._target for each in started] == [_worker_loop]
        process._target = test_workers_of_data_loaders_are_let_be
        process.start()
        assert process._target is not test_workers_of_data_loaders_are_let_be
        children.remove()
    finally:
        BaseProcess.start = original


def test_one_process_alone_is_first(tmp_path: Path) -> None:
    assert [is_first(tmp_path / "claim") for _ in range(3)] == [True, False, False]
