"""Manual pages and shell completions, made from the commands' own help: `make docs` writes them under share/, a test compares them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from memopt.cli.commands import COMMANDS, load
from memopt.cli.main import EPILOG, group

FOLDER = Path(__file__).parents[2] / "share"
_SHORT = "profile, plan and enforce the memory of PyTorch training"
_SHELLS: dict[str, type[ShellComplete]] = {
    "bash-completion/completions/memopt": BashComplete,
    "zsh/site-functions/_memopt": ZshComplete,
    "fish/vendor_completions.d/memopt.fish": FishComplete,
}


def roff(text: str) -> str:
    """`text` so that troff prints it as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


def _paragraphs(text: str) -> Iterator[str]:
    """As click lays them out: a paragraph that begins with \\b keeps its lines."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        kept = paragraph.lstrip().startswith("\b")
        lines = [line.strip() for line in paragraph.replace("\b", "").strip("\n").splitlines()]
        body = roff("\n".join(lines))
        yield f".PP\n.nf\n{body}\n.fi" if kept else f".PP\n{body}"


def _option(option: click.Parameter, context: click.Context) -> str:
    record = option.get_help_record(context)
    if record is None or not record[1]:
        return ""
    return f".TP\n.B {roff(record[0])}\n{roff(record[1])}"


def _page(name: str, command: click.Command, context: click.Context, short: str, body: list[str]) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    options = [text for each in command.get_params(context) if (text := _option(each, context))]
    parts = [
        f'.TH "{roff(name.upper())}" 1 "" "memopt" "memopt manual"',
        f".SH NAME\n{roff(name)} \\- {roff(short.rstrip('.'))}",
        f".SH SYNOPSIS\n.B {roff(context.command_path)}\n{roff(usage)}",
        ".SH DESCRIPTION", *_paragraphs(command.help or short), *body,
        ".SH OPTIONS", *options,
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Path below share/ -> text."""
    root = click.Context(group, info_name="memopt", help_option_names=["-h", "--help"])
    listed = ".SH COMMANDS\n" + "\n".join(
        f".TP\n.BR {roff(f'memopt-{name}')} (1)\n{roff(lazy.help)}" for name, lazy in COMMANDS.items()
    )
    found = {
        "man/man1/memopt.1": _page("memopt", group, root, _SHORT, [listed])
        + "\n".join([".SH NOTES", *_paragraphs(EPILOG), ""])
    }
    for name, lazy in COMMANDS.items():
        command = load(name)
        context = click.Context(command, info_name=name, parent=root)
        text = _page(f"memopt-{name}", command, context, lazy.help, [])
        found[f"man/man1/memopt-{name}.1"] = text + ".SH SEE ALSO\n.BR memopt (1)\n"
    for path, shell in _SHELLS.items():
        complete = shell(group, {}, "memopt", "_MEMOPT_COMPLETE")
        found[path] = complete.source_template % complete.source_vars() + "\n"
    return found


def write() -> None:
    for path in FOLDER.rglob("*"):
        if path.is_file():
            path.unlink()
    for path, text in pages().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text)


if __name__ == "__main__":
    write()
