"""However the script ends, it ends its own way, and leaves what was seen: signals, exceptions, exits, empty hands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memopt.reports.page.moment import end_of, peak_of
from tests.support import warm
from tests.support.profiled import ROOT, SCRIPTS, Profiler, largest, profiler

PARAMETERS = 4 * (64 * 512 + 512 + 512 * 8 + 8)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    with profiler(tmp_path_factory.mktemp("endings")) as server:
        yield server


def test_the_script_is_stopped_once_recorded(profile: Profiler) -> None:
    run = profile("ends.py", "end", "100", options=())
    steps = run.stdout.removesuffix("goodbye\n").split()
    assert run.returncode == 0
    assert steps == [str(step) for step in range(len(steps))]
    assert 2 <= len(steps) <= 12, (
        "three iterations, the print of the last never reached, at most six to time, four watched between those"
    )
    watching = run.trace.watching
    assert watching is not None
    assert watching.ops == run.trace.ops.phase.count(0)
    assert watching.tensors == len(run.trace.slots.node)
    assert watching.error_ms >= 0
    assert (run.trace.partial, run.trace.iteration) == ("", 3)
    assert any(line.startswith("memopt: wrote ") for line in run.stderr.splitlines())
    assert f"({len(run.trace.ops.name)} ops)" not in run.stderr
    assert f", {len(run.trace.ops.name)} ops)" in run.stderr


@pytest.mark.parametrize("how", ["raise", "memory", "exit", "hard", "interrupt", "terminate"])
def test_what_was_recorded_is_whole_however_the_iterations_end_that_are_only_timed(
    profile: Profiler, how: str
) -> None:
    run = profile("ends.py", how, "4", options=())
    assert (run.trace.partial, run.trace.iteration) == ("", 3)
    assert run.trace.step_ms > 0


def test_keep_running_goes_to_the_last_line(profile: Profiler) -> None:
    run = profile("ends.py", "end", "5")
    assert run.stdout == "0\n1\n2\n3\n4\nthe last line\ngoodbye\n"


def test_quiet_says_nothing(profile: Profiler) -> None:
    assert profile("ends.py", "end", "100", options=("-q",)).stderr == ""


@pytest.mark.parametrize("steps", [1, 2])
def test_a_script_that_is_too_short_leaves_its_last_step(profile: Profiler, steps: int) -> None:
    """It can be planned for, and says which step it is."""
    run = profile("ends.py", "end", str(steps), options=())
    assert run.returncode == 0
    assert "goodbye" in run.stdout
    assert run.trace.partial == ""
    assert (run.trace.iteration, run.trace.facts["iterations_seen"]) == (steps, steps)
    made = "1 iteration" if steps == 1 else "2 iterations"
    assert f"memopt: the script made {made} only, and this is number {steps}" in run.stderr
    assert "memopt: next: memopt advise " in run.stderr
    assert any(extra > 0 for extra in run.trace.ops.extra_bytes), "what ops hold inside was measured"
    assert sum(peak_of(run.trace).by_category.values()) == run.trace.peak_bytes
    parameters = [label for label in largest(run.trace, "parameter") if "·" in label]
    assert len(parameters) == 4
    assert len(largest(run.trace, "optimizer state")) == 12


@pytest.mark.parametrize("when", [0, 2])
def test_a_script_that_raises_in_forward(profile: Profiler, when: int) -> None:
    run = profile("ends.py", "raise", str(when), options=())
    assert run.returncode == 1
    assert run.stdout.endswith("goodbye\n")
    assert "ValueError: no good" in run.stderr
    for room in ("memopt", "cli", "profiler", "instrument"):
        assert str(ROOT / room) + os.sep not in run.stderr, "a traceback shows the script's frames only"
    assert run.trace.partial == "the script raised: ValueError: no good"
    assert run.trace.iteration == when + 1
    end = end_of(run.trace)
    assert end is not None
    assert end.by_category["parameter"] == PARAMETERS
    hidden = [held for held in end.held if "relu" in held.label]
    assert [held.size_bytes for held in hidden] == [128 * 512 * 4], "the frames that held it were still there"


def test_out_of_memory_names_what_filled_the_device(profile: Profiler) -> None:
    run = profile("ends.py", "memory", "2", options=())
    assert run.returncode == 1
    assert run.trace.partial.startswith("the script ran out of memory: RuntimeError: ")
    end = end_of(run.trace)
    assert end is not None
    assert end.by_category["parameter"] == PARAMETERS
    assert end.by_category["optimizer state"] == 2 * PARAMETERS + 4 * 4
    shown = profile.memopt("show", str(run.path))["stdout"]
    assert "When it ended there were" in shown
    assert "What fills the device when it ended" in shown


def test_out_of_memory_between_recordings_is_a_snapshot(profile: Profiler) -> None:
    run = profile("ends.py", "memory", "3", options=("--warmup", "6"))
    assert run.trace.op_count == 0
    assert "was not recorded" in run.trace.notes[0]
    peak = peak_of(run.trace)
    assert peak.by_category["parameter"] == PARAMETERS
    assert peak.by_category["optimizer state"] == 2 * PARAMETERS + 4 * 4
    assert peak.by_category["activation"] >= 128 * 512 * 4
    assert profile.memopt("show", str(run.path))["returncode"] == 0


def test_an_op_that_fails_is_the_last_one(profile: Profiler) -> None:
    run = profile("ends.py", "shape", "2", options=())
    assert run.returncode == 1
    end = end_of(run.trace)
    assert end is not None
    assert run.trace.op_name(end.op).startswith("aten.mm")


def test_sys_exit_in_the_middle_keeps_its_code(profile: Profiler) -> None:
    run = profile("ends.py", "exit", "2", options=())
    assert (run.returncode, run.stdout.endswith("goodbye\n")) == (3, True)
    assert (run.trace.partial, run.trace.iteration) == ("", 2), (
        "a whole step tells more than half a third one"
    )


def test_interrupt_dies_of_the_signal_and_leaves_a_profile(profile: Profiler) -> None:
    run = profile("ends.py", "interrupt", "2", options=())
    assert run.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in run.stderr
    assert run.stdout.endswith("goodbye\n")
    assert run.trace.partial == "the script was interrupted"


def test_termination_dies_of_the_signal_and_leaves_a_profile(profile: Profiler) -> None:
    run = profile("ends.py", "terminate", "2", options=())
    assert run.returncode == -signal.SIGTERM
    assert "goodbye" not in run.stdout, "python runs no atexit hook then"
    assert run.trace.partial == "the script was stopped by SIGTERM"
    assert "memopt: wrote" in run.stderr


def test_a_hard_exit_after_the_recording_leaves_the_profile(profile: Profiler) -> None:
    run = profile("ends.py", "hard", "4")
    assert (run.returncode, run.trace.partial) == (4, "")


# --- nothing seen


@pytest.mark.parametrize("args", [(), ("torch",)])
def test_a_script_that_trains_nothing(profile: Profiler, args: tuple[str, ...]) -> None:
    run = profile("no_training.py", *args, options=())
    assert run.returncode == 70
    assert "\nmemopt: no profile was written" in run.stderr
    assert "\n  try: " in run.stderr
    assert not run.path.exists()


def test_a_script_that_trains_nothing_keeps_its_own_code(profile: Profiler) -> None:
    assert profile("no_training.py", "torch", "9", options=()).returncode == 9
    assert profile("no_training.py", "torch", "0").returncode == 0


def test_training_in_another_thread_is_recorded(profile: Profiler) -> None:
    run = profile("in_a_thread.py")
    assert run.stdout == "0\n1\n2\n3\n4\njoined\n"
    assert run.returncode == 0
    assert run.path.exists()
    assert "partial" not in run.stderr


# --- before the script runs


def test_nothing_is_overwritten_unasked(profile: Profiler, tmp_path: Path) -> None:
    path = tmp_path / "kept.json.gz"
    path.write_text("mine")
    refused = profile.memopt("profile", "-o", str(path), str(SCRIPTS / "ends.py"), "end", "100")
    assert (refused["returncode"], refused["stdout"], path.read_text()) == (2, "", "mine")
    forced = profile.memopt("profile", "-f", "-o", str(path), str(SCRIPTS / "ends.py"), "end", "100")
    assert (forced["returncode"], path.read_bytes()[:2]) == (0, b"\x1f\x8b")


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["-o", "-", "x.py"], 2, "stdout belongs to the script"),
        (["nosuch.py"], 2, "cannot run nosuch.py"),
        (["-m", "no.such.module"], 2, "no.such.module"),
        ([sys.executable], 2, "a script is needed"),
        (["/bin/sh"], 2, "binary"),
        (["--outptu", "x", "x.py"], 2, "--output"),
        (["-o", "no/such/folder/x", str(SCRIPTS / "ends.py")], 2, "there is no folder"),
        ([], 2, "Missing argument"),
        (["--steps", "0", "x.py"], 2, "0 is not in the range"),
    ],
)
def test_bad_command_lines(profile: Profiler, args: list[str], code: int, said: str) -> None:
    done = profile.memopt("profile", *args)
    assert (done["returncode"], done["stdout"]) == (code, "")
    assert said in done["stderr"]
    assert "Traceback" not in done["stderr"]


def test_a_script_with_a_syntax_error_is_the_scripts_error(profile: Profiler, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def :\n")
    done = profile.memopt("profile", "-o", str(tmp_path / "p.json.gz"), str(path))
    assert done["returncode"] == 1
    assert "SyntaxError" in done["stderr"]


def test_default_name_carries_the_rank(tmp_path: Path) -> None:
    """In a process of its own: no torch before the script asks for it, and the name in the current folder."""
    (tmp_path / "train.py").write_text(
        "import sys\nassert 'torch' not in sys.modules\n" + (SCRIPTS / "accumulate.py").read_text()
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "memopt", "profile"]
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    following = done.stderr.splitlines()[-1].removeprefix("memopt: rank 3: next: ").split()
    assert following == ["memopt", "advise", "memopt-train-rank3.profile.json.gz", "--budget", "min"]
    planned = warm.python(["-m", *following, "--time-limit", "1"], cwd=tmp_path, env=env)
    assert planned.returncode == 0, "gradients and their sums are nearly all there is, but the command works"
    assert (tmp_path / "memopt-train-rank3.profile.json.gz").exists()
    clash = warm.python(["-m", "memopt", "profile", "-o", "x.json.gz", "train.py"], cwd=tmp_path, env=env)
    assert clash.returncode == 2
    assert "%r" in clash.stderr


def test_names_expand() -> None:
    from memopt.cli.shared.ranks import expand

    assert expand("a-%r-%p-100%%-%x", "3") == f"a-3-{os.getpid()}-100%-%x"
    assert expand("%r", "") == "0"


@pytest.mark.parametrize("steps", [1, 2])
def test_without_warmup_the_first_iteration_is_recorded(profile: Profiler, steps: int) -> None:
    run = profile("ends.py", "end", "4", options=("--warmup", "0", "--steps", str(steps)))
    assert run.returncode == 0
    assert (run.trace.partial, run.trace.iteration) == ("", 1)
    assert run.trace.facts["backward_calls"] == 1


def test_one_step_is_enough_without_warmup(profile: Profiler) -> None:
    run = profile("ends.py", "end", "1", options=("--warmup", "0"))
    assert (run.trace.partial, run.trace.iteration) == ("", 1)


def test_a_name_that_no_file_can_have_is_no_script(tmp_path: Path) -> None:
    for name in ("a" * 300 + ".py", "a/" * 3000):
        done = warm.python(["-m", "memopt", "profile", name], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
