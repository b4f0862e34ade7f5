"""The help inside docs/commands/*.md, made from the program's own: `make docs` writes it, a test compares it."""

from __future__ import annotations

import re
from pathlib import Path

import click

from memopt.cli.main import group
from memopt.cli.table import COMMANDS, load

FOLDER = Path(__file__).parents[2] / "docs" / "commands"
_BLOCK = re.compile(r"<!-- help -->.*?<!-- end of help -->", re.DOTALL)


def help_of(name: str) -> str:
    """What `memopt NAME --help` prints, 100 columns wide."""
    parent = click.Context(
        group,
        info_name="memopt",
        max_content_width=100,
        terminal_width=100,
        help_option_names=["-h", "--help"],
    )
    with click.Context(load(name), info_name=name, parent=parent, terminal_width=100) as context:
        return load(name).get_help(context)


def page_of(name: str) -> str:
    """The page as it is, with the help as it should be; a page that is not there begins with a title."""
    path = FOLDER / f"{name}.md"
    text = (
        path.read_text()
        if path.exists()
        else f"# memopt {name}\n\n{COMMANDS[name].help}\n\n<!-- help --><!-- end of help -->\n"
    )
    block = f"<!-- help -->\n```text\n$ memopt {name} --help\n{help_of(name)}\n```\n<!-- end of help -->"
    return _BLOCK.sub(lambda _: block, text)


def write() -> None:
    for name in COMMANDS:
        (FOLDER / f"{name}.md").write_text(page_of(name))


if __name__ == "__main__":
    write()
