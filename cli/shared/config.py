"""`[tool.memopt]` of the user's pyproject.toml as defaults of options, under the environment and the flags.

[tool.memopt]                # for every command that has such an option
budget = "16GB"
[tool.memopt.profile]        # for one command
warmup = 3
"""

from __future__ import annotations

import os
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from memopt.errors import UsageError

COLORS = ("auto", "always", "never")
Problem = UsageError | click.BadParameter


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
    several = {each.name for each in command.params if isinstance(each, click.Option) and each.multiple}
    found = {options[key]: value for key, value in chosen.items() if key in options}
    return {
        key: [value] if key in several and isinstance(value, str) else value for key, value in found.items()
    }


def told_with_origin(error: Problem, name: str | None) -> Problem:
    """`error` of the command `name`; when it quotes a value of pyproject.toml or the environment, it says so."""
    for option, value, where in _configured(name or ""):
        if isinstance(error, click.BadParameter):
            if error.param is not None and option in map(as_option, error.param.opts):
                told = f"{error.message.rstrip('.')}. It is set by {where}."
                return click.BadParameter(told, error.ctx, error.param)
        elif any(f"'{word.strip()}'" in error.what for word in (value, *value.split(","))):
            why = f"{error.why}; it is set by {where}" if error.why else f"it is set by {where}"
            return UsageError(error.what, why=why, try_=error.try_)
    return error


def _configured(name: str) -> list[tuple[str, str, str]]:
    """(option, value, where it was set) of what the environment and pyproject.toml say for the command `name`."""
    prefix = f"MEMOPT_{name.upper()}_"
    found = [
        (as_option(variable.removeprefix(prefix)), value, variable)
        for variable, value in os.environ.items()
        if variable.startswith(prefix)
    ]
    path = nearest_pyproject(Path.cwd())
    table = read_table(path) if path else {}
    for title, values in ((f"tool.memopt.{name}", table.get(name, {})), ("tool.memopt", table)):
        for key, value in values.items():
            each = value if isinstance(value, list) else [value]
            found += [(as_option(key), str(one), f"[{title}] in {path}") for one in each]
    return found


def configured_color() -> str:
    """`color` of `[tool.memopt]`; `auto` when it is not set."""
    path = nearest_pyproject(Path.cwd())
    choice = (read_table(path) if path else {}).get("color", "auto")
    if choice not in COLORS:
        raise UsageError(
            f"color = {choice!r} in {path} cannot be meant",
            why=f"it is one of {', '.join(COLORS)}",
            try_='color = "auto"',
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
            f"[tool.memopt] in {path} is not a table",
            why=f"it is {table!r}"[:200] if table is not None else "[tool] is none either",
            try_="[tool.memopt] with one option a line",
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
    from memopt.cli.table import COMMANDS, load

    known = {name for command in COMMANDS for name in option_names(load(command))} | {"color"}
    for key in keys:
        if as_option(key) not in known:
            raise _unknown(path, "tool.memopt", key, sorted(known))


def _check_tables(path: Path, names: list[str]) -> None:
    from memopt.cli.table import COMMANDS

    for name in names:
        if name not in COMMANDS:
            raise _unknown(path, "tool.memopt", name, list(COMMANDS))


def _unknown(path: Path, table: str, key: str, known: list[str]) -> UsageError:
    near = get_close_matches(as_option(key), known, n=1)
    return UsageError(
        f"[{table}] in {path} has an unknown key '{key}'",
        try_=f"{near[0]}" if near else "memopt COMMAND --help, for the options that there are",
    )
