"""`[tool.memopt]` of the user's pyproject.toml as defaults of options, under the environment and the flags.

[tool.memopt]                # for every command that has such an option
budget = "16GB"
[tool.memopt.profile]        # for one command
warmup = 3
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from memopt.errors import UsageError

COLORS = ("auto", "always", "never")


def defaults_for(name: str, command: click.Command) -> dict[str, Any]:
    """Option defaults that the nearest pyproject.toml gives to the command `name`, by parameter name."""
    path = nearest_pyproject(Path.cwd())
    table = read_table(path) if path else {}
    if not table or path is None:
        return {}
    options = option_names(command)
    shared = {key: value for key, value in table.items() if not isinstance(value, dict)}
    own = table.get(name, {})
    for key in own:
        if as_option(key) not in options:
            raise _unknown(path, f"tool.memopt.{name}", key, sorted(options))
    _check_shared(path, [key for key in shared if as_option(key) not in options])
    _check_tables(path, [key for key, value in table.items() if isinstance(value, dict)])
    chosen = {as_option(key): value for key, value in shared.items()} | {
        as_option(key): value for key, value in own.items()
    }
    return {options[key]: value for key, value in chosen.items() if key in options}


def configured_color() -> str:
    """`color` of `[tool.memopt]`; `auto` when it is not set."""
    path = nearest_pyproject(Path.cwd())
    choice = (read_table(path) if path else {}).get("color", "auto")
    if choice not in COLORS:
        raise UsageError(
            f"color = {choice!r} in {path} is not one of {', '.join(COLORS)}", try_='color = "auto"'
        )
    return str(choice)


def nearest_pyproject(folder: Path) -> Path | None:
    """The first pyproject.toml in `folder` or above it."""
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        if path.is_file():
            return path
    return None


def read_table(path: Path) -> dict[str, Any]:
    """`[tool.memopt]` of the file at `path`; empty when there is none."""
    try:
        table: Any = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("memopt", {})
    except OSError:
        return {}  # somebody else's unreadable file; it is not for us to complain
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}", why=str(error), try_="mend the file") from error
    except AttributeError:
        table = None
    if not isinstance(table, dict):
        raise UsageError(
            f"[tool.memopt] in {path} is not a table", try_="[tool.memopt] with one option a line"
        )
    return table


def as_option(key: str) -> str:
    return key.lstrip("-").replace("_", "-").lower()


def option_names(command: click.Command) -> dict[str, str]:
    """Long option name without dashes -> parameter name, for each option that can be configured."""
    names = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name and not parameter.is_eager:
            names[as_option(parameter.name)] = parameter.name
            for text in parameter.opts:
                if text.startswith("--"):
                    names[as_option(text)] = parameter.name
    return names


def _check_shared(path: Path, keys: list[str]) -> None:
    """Refuse keys that no command knows; other commands are imported only when there is a doubt."""
    if not keys:
        return
    from memopt.cli.commands import COMMANDS, load

    known = {name for command in COMMANDS for name in option_names(load(command))} | {"color"}
    for key in keys:
        if as_option(key) not in known:
            raise _unknown(path, "tool.memopt", key, sorted(known))


def _check_tables(path: Path, names: list[str]) -> None:
    from memopt.cli.commands import COMMANDS

    for name in names:
        if name not in COMMANDS:
            raise _unknown(path, "tool.memopt", name, list(COMMANDS))


def _unknown(path: Path, table: str, key: str, known: list[str]) -> UsageError:
    near = get_close_matches(as_option(key), known, n=1)
    return UsageError(
        f"[{table}] in {path} has an unknown key '{key}'",
        try_=f"{near[0]}" if near else "memopt COMMAND --help, for the options that there are",
    )
