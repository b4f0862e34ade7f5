"""`memopt live`: the script's terminal stays its own, the foot follows its size, and the end leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from memopt.reports.live import ROWS, Now, panel, plain_line, sampled

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
import torch
print("a terminal" if sys.stdout.isatty() else "no terminal", flush=True)
net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
steps, step = int(sys.argv[1]), 0
while step < steps or not os.path.exists(os.environ.get("WAIT_FOR", ".")):
    optimizer.zero_grad()
    net(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    print("step", step, flush=True)
    step += 1
    time.sleep(0.02)
sys.exit(int(sys.argv[2]))
"""


def now(**changes: object) -> Now:
    found = Now(
        script="train.py",
        used_bytes=3 << 30,
        peak_bytes=4 << 30,
        room_bytes=8 << 30,
        steps=12,
        step_ms=345.6,
        seconds=75.0,
    )
    found.history.extend(range(0, 1000, 10))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_panel_is_as_wide_as_the_terminal_and_no_wider(width: int) -> None:
    lines = panel(now(), width, color=False)
    assert len(lines) == ROWS
    assert all(len(line) <= width for line in lines)


def test_the_panel_says_how_much_of_what() -> None:
    lines = panel(now(), 100, color=False)
    assert "train.py on cpu" in lines[0]
    assert lines[1].endswith("3.00 GiB of 8.00 GiB")
    assert lines[1].count("█") == round(lines[1].index(" ") * 3 / 8)
    assert lines[2] == "peak 4.00 GiB (process)  step 12, 346 ms each  1:15"
    assert plain_line(now()) == "3.00 GiB now, peak 4.00 GiB (process), step 12, 346 ms each, 1:15"
    assert sampled([1, 2, 3], 2) == [2, 3]


def test_a_hostile_name_writes_no_escape() -> None:
    assert "\x1b[2J" not in "".join(panel(now(script="\x1b[2J.py"), 80, color=False))


def start(
    folder: Path, *args: str, rows: int = 30, columns: int = 80, **environment: str
) -> tuple[subprocess.Popen[bytes], int]:
    (folder / "train.py").write_text(SCRIPT)
    leader, follower = pty.openpty()
    resize(leader, rows, columns)
    env = (
        os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"} | environment
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "memopt", "live", "--interval", "0.05", "train.py", *args],
        cwd=folder, env=env, stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    return process, leader


def resize(leader: int, rows: int, columns: int) -> None:
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read_until(leader: int, what: bytes, seconds: float = 90.0) -> bytes:
    """All that is written until `what` is; to the end where `what` is empty."""
    found, end = b"", time.monotonic() + seconds
    while time.monotonic() < end and (not what or what not in found):
        if not select.select([leader], [], [], 0.2)[0]:
            continue
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        found += part
    return found


def test_the_script_has_its_terminal_and_the_foot_follows_its_size(tmp_path: Path) -> None:
    resized = tmp_path / "resized"
    process, leader = start(tmp_path, "60", "3", WAIT_FOR=str(resized))
    text = read_until(leader, b"step 1\r\n")
    assert b"a terminal\r\n" in text
    resize(leader, 24, 60)
    text += read_until(leader, b"\x1b[1;19r")
    resized.touch()
    text += read_until(leader, b"")
    assert process.wait(timeout=60) == 3
    os.close(leader)
    scrolled = re.sub(
        rb"\x1b7.*?\x1b8", b"", text, flags=re.DOTALL
    )  # the foot is drawn where the terminal takes it: inside a line, too
    assert [int(n) for n in re.findall(rb"step (\d+)\r\n", scrolled)][-1] >= 59
    assert b"\x1b[1;25r" in text, "30 rows, of which 5 are the foot"
    assert b"\x1b[1;19r" in text, "24 rows after the change"
    assert text.rindex(b"\x1b[r") > text.rindex(b"\x1b[1;19r"), "at the end the whole terminal scrolls again"
    assert b"memopt: " in b"".join(text.rstrip().splitlines()[-2:]), "wrapped at the width of the terminal"


def test_without_a_terminal_stdout_is_the_scripts_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "memopt", "live", "train.py", "3", "0"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "no terminal\nstep 0\nstep 1\nstep 2\n")
    lines = done.stderr.splitlines()
    assert all(line.startswith("memopt: ") for line in lines), "one every ten seconds, and one at the end"
    assert re.fullmatch(r"memopt: .* now, peak .* \(process\), step 3, .*", lines[-1])


def test_a_small_terminal_has_no_foot(tmp_path: Path) -> None:
    process, leader = start(tmp_path, "2", "0", rows=8)
    text = read_until(leader, b"")
    assert process.wait(timeout=60) == 0
    os.close(leader)
    assert b"\x1b[1;" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_the_terminal_back(tmp_path: Path, number: int) -> None:
    process, leader = start(tmp_path, "5000", "0")
    text = read_until(leader, b"step 1\r\n")
    os.killpg(process.pid, number)
    text += read_until(leader, b"")
    assert process.wait(timeout=60) == -number
    os.close(leader)
    assert text.rindex(b"\x1b[r") > text.rindex(b"\x1b[1;25r")
