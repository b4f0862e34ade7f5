"""What `memopt run` does while the script waits for its plan, and how often it looks at all that lives: each look takes long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_run import SCRIPT, memopt

LOGGED = """
import sys
from memopt.cli.main import main
from memopt.cli.run import planning, stages
from memopt.profiler import known, session
from memopt.profiler.timing import bandwidth

def logged(owner, name, word):
    whole = getattr(owner, name)
    def told(*args, **kwargs):
        print("LOG", word or sys._getframe(1).f_code.co_name, file=sys.stderr)
        return whole(*args, **kwargs)
    setattr(owner, name, told)

logged(known, "there_now", "")
logged(planning.Planning, "__init__", "order")
logged(session.ProfileSession, "finished", "finished")
logged(bandwidth, "measure_disk", "disk")  # the planner's process has done that
logged(stages.Stages, "_enforce", "enforce")
main(prog_name="memopt")
"""
BESIDE = "\nimport threading\nstopped = threading.Event()\nthreading.Thread(target=lambda: stopped.wait(30), daemon=True).start()\n"


@pytest.mark.parametrize("beside", ["", BESIDE], ids=["alone", "beside a thread"])
def test_what_another_process_can_do_and_what_can_be_done_meanwhile_is_not_waited_for(
    beside: str, tmp_path: Path
) -> None:
    """A thread of the script's may make tensors meanwhile: then what lives is looked for when the plan is there."""
    (tmp_path / "train.py").write_text(beside + SCRIPT)
    (tmp_path / "logged.py").write_text(LOGGED)
    args = ("run", "--budget", "4MiB", "--time-limit", "0.5", "train.py")
    done = memopt(tmp_path, *args, until="memopt: under its plan", program=("logged.py",), cold=True)
    assert done.returncode == 0, done.stderr
    words = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("LOG ")]
    ready = ["enforce", "_first_look"] if beside else ["_get_ready", "enforce"]
    assert words[: words.index("enforce") + 1 + bool(beside)] == [
        "_are_all_there",
        "there",
        "order",
        "finished",
        *ready,
    ]
    assert "_first_look" not in words or beside
