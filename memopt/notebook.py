"""`%%memopt` in IPython: a cell that trains is recorded, and its profile is shown below it."""

from __future__ import annotations

import shlex
from typing import Any

from memopt.errors import MemoptError


def register(shell: Any) -> None:
    """Add the magic to the IPython `shell`."""

    def memopt(line: str, cell: str) -> Any:
        """Record one steady iteration of the training steps in this cell and show it.

        %%memopt [-o FILE] [--warmup N]
        """
        return _run(shell, line, cell)

    shell.register_magic_function(memopt, magic_kind="cell", magic_name="memopt")


def _run(shell: Any, line: str, cell: str) -> Any:
    from memopt.api import profile

    try:
        path, warmup = _options(line)
        with profile(path, warmup=warmup, force=True) as found:
            shell.run_cell(cell).raise_error()
    except MemoptError as error:
        print(f"memopt: {error}")
        return None
    return found.result


def _options(line: str) -> tuple[str | None, int]:
    import argparse

    parser = argparse.ArgumentParser(prog="%%memopt", add_help=False, exit_on_error=False)
    parser.add_argument("-o", "--output")
    parser.add_argument("--warmup", type=int, default=2)
    try:
        found = parser.parse_args(shlex.split(line))
    except (argparse.ArgumentError, SystemExit, ValueError) as error:
        raise MemoptError(
            f"'%%memopt {line}' is not understood", why=str(error), try_="%%memopt -o run.profile.json.gz"
        ) from error
    return found.output, found.warmup
