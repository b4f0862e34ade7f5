"""The documents: one page a command with the program's own help, a tutorial that runs, a workflow whose commands exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from memopt.cli.table import COMMANDS, load
from tests.support import man_pages
from tests.support.command_pages import FOLDER, page_of
from tests.support.profiled import profiler

DOCS = FOLDER.parent
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_with_its_help(name: str) -> None:
    path = FOLDER / f"{name}.md"
    assert path.is_file(), "make docs, then write what it is for"
    assert path.read_text() == page_of(name), "make docs"
    assert "<!-- help -->" in path.read_text()


def test_no_page_is_of_a_command_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(COMMANDS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_links_and_pictures_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)[^):]*\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_commands_in_documents_are_understood(path: Path) -> None:
    """Options that the documents show exist."""
    for line in re.findall(r"^(?:\$ |[ -]*(?:run: )?)memopt ([a-z]+ .*)$", path.read_text(), re.MULTILINE):
        if line.split()[0] not in COMMANDS:
            continue  # a sentence that begins with our name
        words = shlex.split(line.partition("#")[0].partition("&&")[0].partition(">")[0])
        if "--help" in words:
            continue
        known = {name for param in load(words[0]).params for name in param.opts}
        script = next(
            (i for i, word in enumerate(words) if word.endswith(".py") or word == "torchrun"), len(words)
        )
        for word in words[1:script]:
            if word == "--":
                break
            if word.startswith("-"):
                assert word.partition("=")[0] in known, line


def test_manual_pages_and_completions_are_those_of_the_commands() -> None:
    found = {
        path.relative_to(man_pages.FOLDER).as_posix(): path.read_text()
        for path in man_pages.FOLDER.rglob("*")
        if path.is_file()
    }
    assert found == man_pages.pages(), "make docs"


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff here: apt-get install groff-base")
@pytest.mark.parametrize("name", ["memopt", *(f"memopt-{name}" for name in COMMANDS)])
def test_manual_pages_are_set_without_a_warning(name: str) -> None:
    path = man_pages.FOLDER / "man" / "man1" / f"{name}.1"
    done = subprocess.run(["groff", "-man", "-ww", "-Tascii", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    text = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    command = name.removeprefix("memopt").removeprefix("-")
    if command:
        options = [
            each for each in load(command).params if isinstance(each, click.Option) and not each.hidden
        ]
        assert [opt for each in options for opt in each.opts if opt not in text] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_options_and_choices() -> None:
    script = man_pages.FOLDER / "bash-completion" / "completions" / "memopt"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for words, wanted in (
        (["memopt", "rep"], "report"),
        (["memopt", "report", "--no-so"], "--no-source"),
        (["memopt", "report", "--format", "perf"], "perfetto"),
    ):
        line = " ".join(shlex.quote(word) for word in words)
        code = f". {shlex.quote(str(script))}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _memopt_completion memopt; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [wanted], done.stderr


def test_the_tutorial_runs(tmp_path: Path) -> None:
    text = (DOCS / "tutorial.md").read_text()
    for name, code in re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(code)
    (tmp_path / "pyproject.toml").write_text("[tool.memopt.advise]\ntime-limit = 1\n")
    commands = re.findall(r"^\$ memopt (.*)$", text, re.MULTILINE)
    assert len(commands) >= 6
    with profiler(tmp_path) as run:
        for command in commands:
            done = run.memopt(*shlex.split(command))
            assert done["returncode"] == 0, (command, done["stderr"])
    assert (tmp_path / "memopt-train.report.html").stat().st_size > 1_000_000
    assert (tmp_path / "plan.html").is_file()
    assert "identical" in done["stdout"]


def test_options_of_every_command_are_told_apart() -> None:
    for name in COMMANDS:
        options = [each for each in load(name).params if isinstance(each, click.Option)]
        names = [opt for option in options for opt in option.opts]
        assert len(names) == len(set(names))
