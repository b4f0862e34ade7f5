"""The command line's frame: instant help, suggestions, exit codes, configuration, colour, clean streams."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

import memopt
from memopt.cli.main import run
from memopt.cli.shared.config import defaults_for
from memopt.cli.table import COMMANDS, load
from memopt.errors import (
    BadFile,
    BudgetInfeasible,
    GateFailed,
    MemoptError,
    NotPossibleHere,
    RunFailed,
    UsageError,
    VerifyFailed,
)
from memopt.units import parse_bytes

ROOT = Path(__file__).parents[2]
ENV = {
    k: v for k, v in os.environ.items() if not k.startswith(("MEMOPT_", "_MEMOPT", "NO_COLOR", "FORCE_COLOR"))
}
ENV["PYTHONPATH"] = str(ROOT)


def shell(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memopt", *args], capture_output=True, text=True, timeout=60, env=ENV | env
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> click.Command:
    """A stand-in for `memopt advise`, so that the frame is tested apart from what hangs in it."""

    @click.command("advise")
    @click.option("--budget", default="80%")
    @click.option("--swap-dir", default=".")
    @click.option("--allow", multiple=True)
    @click.option("--fail", default="")
    def advise(budget: str, swap_dir: str, allow: tuple[str, ...], fail: str) -> int:
        if fail:
            raise ERRORS[fail]
        click.echo(f"{budget} {swap_dir} {','.join(allow)}")
        return 0

    monkeypatch.setattr("memopt.cli.commands.load", lambda name: advise)
    return advise


ERRORS: dict[str, MemoptError] = {
    "usage": UsageError("what", why="because", try_="this"),
    "file": BadFile("what", why="because", try_="this"),
    "budget": BudgetInfeasible(2**30, 2**31, ("because",), try_="this"),
    "gate": GateFailed("what", why="because", try_="this"),
    "verify": VerifyFailed("what", why="because", try_="this"),
    "here": NotPossibleHere("what", why="because", try_="this"),
    "run": RunFailed("what", why="because", try_="this"),
}
CODES = {"usage": 2, "file": 1, "budget": 3, "gate": 3, "verify": 1, "here": 1, "run": 70}


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from memopt.cli.main import run
assert run(["--help"]) == 0
heavy = {"torch", "numpy", "pandas", "plotly", "rich", "onnx", "highspy", "msgspec"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr
    assert "Record one steady iteration" in done.stdout


def test_help_is_instant() -> None:
    """Beside what python and click alone need, turn about: a clock alone would measure the machine's load."""

    def seconds(run) -> float:
        begin = time.perf_counter()
        assert run().returncode == 0
        return time.perf_counter() - begin

    def bare() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", "import click"], capture_output=True, text=True)

    pairs = [(seconds(lambda: shell("--help")), seconds(bare)) for _ in range(5)]
    assert min(help_s for help_s, _ in pairs) <= 4 * min(bare_s for _, bare_s in pairs)


def test_version() -> None:
    done = shell("--version")
    assert (done.returncode, done.stdout) == (0, f"memopt {memopt.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_without_torch(name: str) -> None:
    code = f"""
import sys
from memopt.cli.main import run
assert run([{name!r}, "--help"]) == 0
assert "torch" not in sys.modules, "torch"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ")
    assert all(option.help for option in load(name).params if isinstance(option, click.Option))
    assert COMMANDS[name].help.endswith(".")


def test_command_without_a_module_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.cli.table import Lazy

    monkeypatch.setitem(COMMANDS, "doctor", Lazy("memopt.cli.nowhere:nothing", "Nothing."))
    assert run(["doctor", "--any", "thing"]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("memopt: `memopt doctor` is not implemented in this build\n  ")


def test_missing_dependency_of_a_command_is_not_mistaken_for_a_missing_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.cli.table import Lazy

    (tmp_path / "needy.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "doctor", Lazy("needy:doctor", "Nothing."))
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load("doctor")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["profle"], "Did you mean 'profile'?"),
        (["zzz"], "No such command 'zzz'."),
        (["doctor", "--jsn"], "Did you mean '--json'?"),
        (["--colour", "never"], "Did you mean '--color'?"),
        (["--color", "red"], "'red' is not one of"),
        (["doctor", "what"], "unexpected extra argument"),
    ],
)
def test_typos_exit_2_with_a_hint_on_stderr(args: list[str], says: str) -> None:
    done = shell(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_three_parts_on_stderr(
    name: str, command: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["advise", "--fail", name]) == CODES[name]
    streams = capsys.readouterr()
    assert streams.out == ""
    first, why, hint = streams.err.splitlines()
    assert first.startswith("memopt: ")
    assert (why, hint) == ("  because", "  try: this")


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("advise")
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("memopt.cli.commands.load", lambda name: broken)
    with pytest.raises(ZeroDivisionError):
        run(["advise"])


def test_configuration_lies_under_environment_and_flags(
    command: click.Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.memopt]\nbudget = "1GB"\nswap_dir = "shared"\n[tool.memopt.advise]\nswap-dir = "own"\nallow = ["a", "b"]\n'
    )
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    said = []
    for env, args in (
        ({}, []),
        ({"MEMOPT_ADVISE_BUDGET": "2GB"}, []),
        ({"MEMOPT_ADVISE_BUDGET": "2GB"}, ["--budget", "3GB"]),
    ):
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        assert run(["advise", *args]) == 0
        said.append(capsys.readouterr().out)
    assert said == ["1GB own a,b\n", "2GB own a,b\n", "3GB own a,b\n"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.memopt.advise]\nbudgte = 1", "[tool.memopt.advise]"),
        ("[tool.memopt]\nbudgte = 1", "try: budget"),
        ("[tool.memopt.advice]\nbudget = 1", "try: advise"),
        ("[tool]\nmemopt = 3", "is not a table"),
        ("tool = 3", "is not a table"),
        ("[tool.memopt\n", "cannot read"),
        ('[tool.memopt]\ncolor = "red"', "it is one of"),
    ],
)
def test_wrong_configuration_is_a_usage_error(
    text: str,
    says: str,
    command: click.Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run(["advise"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert says in streams.err


def test_pyproject_of_others_is_left_alone(
    command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 3\n")
    monkeypatch.chdir(tmp_path)
    assert defaults_for("advise", command) == {}


def test_interrupt_ends_by_the_signal(tmp_path: Path) -> None:
    code = """
import os, signal, click
from memopt.cli import commands, main
@click.command("advise")
def advise():
    os.kill(os.getpid(), signal.SIGINT)
    import time; time.sleep(5)
commands.load = lambda name: advise
main.main(["advise"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=30)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""
    assert "memopt: interrupted" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m memopt doctor | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENV, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1")


@pytest.mark.parametrize(("ending", "code"), [("> /dev/full", 1), (">&-", 0)])
def test_stdout_that_takes_nothing(ending: str, code: int) -> None:
    command = f"{sys.executable} -m memopt strategies {ending}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENV, timeout=60)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert ("No space left" in done.stderr) == (code == 1)


@pytest.mark.parametrize(("closed", "stdout"), [("2>&-", "trained\n"), ("<&- >&- 2>&-", "")])
def test_stderr_that_was_closed(closed: str, stdout: str, tmp_path: Path) -> None:
    """As daemons start programs: the profile is made, and nothing else goes to the script's stdout."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "w = torch.ones(1000, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([w], lr=0.1)\n"
        "for step in range(4):\n"
        "    (w * w).sum().backward()\n"
        "    optimizer.step()\n"
        "print('trained')\n"
    )
    command = f"{sys.executable} -m memopt profile --keep-running {script} {closed}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=ENV, timeout=120, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, stdout)
    assert (tmp_path / "memopt-train.profile.json.gz").exists()


PAINT = """
from memopt.cli.shared.console import err, out, say
import click
from memopt.cli import commands, main
from rich.table import Table
from rich.text import Text
@click.command("advise")
def advise():
    out().print(Text("red", style="red"))
    table = Table("number")
    table.add_row("1234567890" * 15)
    out().print(table)
    say("said")
commands.load = lambda name: advise
main.main({args})
"""


def on_a_terminal(args: list[str], **env: str) -> str:
    main, other = pty.openpty()
    command = [sys.executable, "-c", PAINT.format(args=args)]
    process = subprocess.Popen(
        command, stdout=other, stderr=subprocess.PIPE, env=ENV | {"TERM": "xterm"} | env
    )
    os.close(other)
    shown = b""
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
    assert process.wait(30) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b"memopt: said\n"
    process.stderr.close()
    os.close(main)
    return shown.decode()


@pytest.mark.parametrize(
    ("args", "env", "coloured"),
    [
        ([], {}, True),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"TERM": "dumb"}, False),
        (["--color", "never"], {}, False),
        ([], {"MEMOPT_COLOR": "never"}, False),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
    ],
)
def test_colour_on_a_terminal(args: list[str], env: dict[str, str], coloured: bool) -> None:
    assert ("\x1b[" in on_a_terminal([*args, "advise"], **env)) is coloured


@pytest.mark.parametrize(
    ("args", "env", "coloured"),
    [([], {}, False), ([], {"FORCE_COLOR": "1"}, True), (["--color", "always"], {}, True)],
)
def test_colour_in_a_pipe(args: list[str], env: dict[str, str], coloured: bool) -> None:
    command = [sys.executable, "-c", PAINT.format(args=[*args, "advise"])]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENV | {"TERM": "xterm"} | env, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert ("\x1b[" in done.stdout) is coloured
    assert "1234567890" * 15 in done.stdout, "a number was cut"


@pytest.mark.parametrize("language", ["bash", "zsh", "fish"])
def test_completion_source(language: str) -> None:
    done = shell(_MEMOPT_COMPLETE=f"{language}_source")
    assert done.returncode == 0, done.stderr
    assert "_MEMOPT_COMPLETE" in done.stdout


def test_completion_of_commands() -> None:
    done = shell(_MEMOPT_COMPLETE="bash_complete", COMP_WORDS="memopt s", COMP_CWORD="1")
    assert done.stdout.split() == ["plain,show", "plain,strategies"]


def test_doctor_tells_this_machine(tmp_path: Path) -> None:
    done = shell("doctor", "--json", "--swap-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["memopt"] == memopt.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["ram"]["total_bytes"] > 2**28
    assert facts["swap_dir"]["writable"] is True
    assert facts["swap_dir"]["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    gpu = facts["torch"]["accelerator"] is not None
    assert facts["possible"]["swap to host memory"].startswith("yes" if gpu else "no: ")


def test_doctor_in_words() -> None:
    done = shell("doctor", "--swap-dir", "/nowhere/at/all")
    assert (done.returncode, done.stderr) == (0, "")
    assert "swap to disk?" in done.stdout
    assert "cannot be written (No such file or directory)" in done.stdout


def test_progress_is_one_line_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from memopt.cli.shared.console import progress

    with progress("searching", total=3) as advance:
        for _ in range(3):
            advance(1)
    assert capsys.readouterr() == ("", "memopt: searching\n")


def test_progress_is_a_bar_on_a_terminal() -> None:
    code = """
from memopt.cli.shared.console import progress
with progress("searching", total=2) as advance:
    advance(1)
    advance(1)
"""
    main, other = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=other,
        env=ENV | {"TERM": "xterm"},
        timeout=30,
    )
    os.close(other)
    shown = os.read(main, 65536).decode()
    os.close(main)
    assert (done.returncode, done.stdout) == (0, b"")
    assert "searching" in shown
    assert "━" in shown


def test_narrow_encoding_does_not_kill_the_output() -> None:
    command = [sys.executable, "-c", PAINT.format(args=["advise"]).replace('Text("red"', 'Text("µs → ✓"')]
    env = ENV | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "?s ? ?" in done.stdout


@pytest.mark.parametrize("peak", [1_003_000_000, 1_077_400_000, 104_900, 2**31 - 1])
def test_the_budget_that_an_error_offers_is_one_that_is_met(peak: int) -> None:
    """Amounts are rounded to three digits: the peak itself, rounded down, would be refused again."""
    offered = re.search(r"--budget ([0-9.]+\w+)", BudgetInfeasible(1, peak).try_)
    assert offered is not None
    assert parse_bytes(offered[1]) >= peak


@pytest.mark.parametrize(
    ("command", "family", "offered"),
    [
        ("advise", "plan", "memopt apply 'my file'"),
        ("advise", "graph", "memopt advise --graph 'my file'"),
        ("apply", "trace", "memopt advise 'my file'"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str, family: str, offered: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("my file").write_text(json.dumps({"schema": f"memopt.{family}/1"}))
    assert run([command, "my file", *(["--budget", "60%"] if command == "advise" else [])]) == 1
    said = capsys.readouterr().err
    assert "  it is a " in said
    assert "to write it again" not in said
    assert offered in said.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    "words",
    [
        ["advise", "--budget", "60%", "--time-limit", "nan"],
        ["advise", "--budget", "60%", "--graph", "g.json", "--in-gbps", "nan"],
        ["advise", "--budget", "60%", "--graph", "g.json", "--out-gbps", "inf"],
        ["estimate", "--timeout", "nan", "train.py"],
    ],
)
def test_not_a_number_is_within_no_range(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert "is not a finite number" in capsys.readouterr().err


def test_an_argument_of_the_script_is_told_to_follow_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["apply", "plan.json", "--epochs", "90"]) == 2
    assert "try: memopt apply PLAN -- --epochs ..." in capsys.readouterr().err


@pytest.mark.parametrize("command", [["profile"], ["estimate"]])
def test_a_notebook_is_no_script(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.ipynb").write_text("{}")
    assert run([*command, "train.ipynb"]) == 2
    said = capsys.readouterr().err
    assert "it is a notebook" in said
    assert "nbconvert" in said
