"""The documents: one page a command with the program's own help, a tutorial that runs, a workflow whose commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from memopt.cli.table import COMMANDS, load
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
        words = shlex.split(line.partition("#")[0].partition("&&")[0].partition(">")[0])
        if words[0] not in COMMANDS or "--help" in words:
            continue
        known = {name for param in load(words[0]).params for name in param.opts}
        script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
        for word in words[1:script]:
            if word == "--":
                break
            if word.startswith("-"):
                assert word.partition("=")[0] in known, line


def test_the_tutorial_runs(tmp_path: Path) -> None:
    text = (DOCS / "tutorial.md").read_text()
    for name, code in re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(code)
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
