"""`python(words)`: as `subprocess.run([sys.executable, *words])`, in a process that was forked after torch's import, which takes seconds.

Where the start itself is what is tested (imports, signals, closed streams, `torchrun`), `subprocess` it is.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
_READ_AT_THE_START = ("PYTHON", "OMP_", "MKL_", "TORCH_", "LD_", "MALLOC_")
"""Environment that python and torch read as they start: what asks for another one gets a process of its own."""


def python(
    words: list[str], *, cwd: Path | str | None = None, env: dict[str, str] | None = None, timeout: float = 300,
    stdin: str | None = None, cold: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `python *words` to its end: what it wrote, and how it ended; `cold`: torch is not imported before the script asks for it."""
    env = dict(os.environ if env is None else env)
    command = [sys.executable, *words]
    cold = cold or (words[0] == "-m" and words[1].partition(".")[0] not in ("memopt", "benchmarks"))
    if cold or _at_start(env) != _at_start(dict(os.environ)):
        return subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout, input=stdin
        )
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        for file in files:
            file.write_text(stdin if stdin and file.name == "stdin" else "")
        paths = [str(file) for file in files]
        code = _server().run(words, cwd=cwd, env=env, files=paths, timeout=timeout)
        return subprocess.CompletedProcess(command, code, files[1].read_text(), files[2].read_text())


def fake_run(arguments: list[str], output: Any, timeout_s: float) -> int:
    """As `memopt.estimators.fake.script.run._wait_for`, for which it stands in the tests."""
    code = "from memopt.estimators.fake.script.child import main; main()"
    files = [os.devnull, output.name, output.name]
    return _server().run(
        ["-c", code, *arguments], cwd=None, env=dict(os.environ), files=files, timeout=timeout_s
    )


def _at_start(env: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join(
        each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", str(ROOT))
    )
    found = {name: value for name, value in env.items() if name.startswith(_READ_AT_THE_START)}
    return found | {"PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"}


class Started:
    """A process that is running, as `subprocess.Popen` with pipes of text."""

    def __init__(self, pid: int, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self._code: int | None = None

    def wait(self, timeout: float) -> int:
        """How it ended; it is killed where it has not ended by then."""
        if self._code is None:
            self._code = _server().ended(self.pid, timeout)
        return self._code


@contextmanager
def started(words: list[str], *, cwd: Path | str, env: dict[str, str]) -> Iterator[Started]:
    """`python *words` while it runs; it has ended when the block has."""
    assert _at_start(env) == _at_start(dict(os.environ))
    with tempfile.TemporaryDirectory() as folder:
        out, err = (os.path.join(folder, name) for name in ("stdout", "stderr"))
        os.mkfifo(out)
        os.mkfifo(err)
        pid = _server().start(words, cwd=cwd, env=env, files=[os.devnull, out, err])
        with open(out) as stdout, open(err) as stderr:  # in the order in which the process opens them
            running = Started(pid, stdout, stderr)
            try:
                yield running
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                raise
            finally:
                running.wait(60)


class _Server:
    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MEMOPT_", "RANK", "WORLD_SIZE"))}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "forkserver.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT,
            env=env | {"PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )  # fmt: skip
        atexit.register(self.close)

    def run(
        self,
        words: list[str],
        *,
        cwd: Path | str | None,
        env: dict[str, str],
        files: list[str],
        timeout: float,
    ) -> int:
        return self.ended(self.start(words, cwd=cwd, env=env, files=files), timeout)

    def start(
        self, words: list[str], *, cwd: Path | str | None, env: dict[str, str], files: list[str]
    ) -> int:
        """The process id of `words`, which `ended` is to be asked about before another starts."""
        assert self._process.stdin is not None
        folder = os.path.abspath(cwd or os.getcwd())
        streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        self._process.stdin.write(json.dumps({"words": words, "cwd": folder, "env": env} | streams) + "\n")
        pid = self._answer(60)
        assert pid is not None
        return pid

    def ended(self, pid: int, timeout: float) -> int:
        code = self._answer(timeout)
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            self._answer(60)
            raise subprocess.TimeoutExpired([sys.executable], timeout)
        return code

    def _answer(self, timeout: float) -> int | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        return int(self._process.stdout.readline()) if ready else None

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)


@functools.cache
def _server() -> _Server:
    return _Server()
