"""`memopt`: the command group, and the one place where errors become words and exit codes."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from memopt.cli.commands import LazyGroup
from memopt.cli.shared.config import COLORS, configured_color
from memopt.cli.shared.console import say
from memopt.errors import MemoptError, UsageError
from memopt.version import VERSION

_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
EPILOG = """\b
Exit codes: 0 done; 1 failed; 2 not understood; 3 the budget cannot be met, or a gate failed.
profile and apply end as the script ends; 70 there means that memopt itself failed.

\b
Sizes: 16GB is 16*10^9 bytes, 16GiB or 16g is 16*2^30, 80% is a share of the unplanned peak.
Defaults: [tool.memopt] in pyproject.toml, then MEMOPT_<COMMAND>_<OPTION>, then flags.
Completion: eval "$(_MEMOPT_COMPLETE=bash_source memopt)" (or zsh_source; fish_source for fish).
"""


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "MEMOPT",
        "max_content_width": 110,
    },
)
@click.version_option(VERSION, prog_name="memopt", message="%(prog)s %(version)s")
@click.option("--color", type=click.Choice(COLORS), default=None, help="When to colour the output.")
@click.pass_context
def group(context: click.Context, color: str | None) -> None:
    """Where a PyTorch training script's device memory goes, what to change so that it fits, and the run that does it.

    \b
    memopt profile train.py --epochs 1
    memopt advise --budget 16GB
    memopt apply memopt-train.plan.json
    """
    context.params["color"] = color or configured_color()


def main(args: Sequence[str] | None = None, prog_name: str = "memopt") -> NoReturn:
    """Run the command line `args` (default: `sys.argv`) and exit; never returns."""
    sys.exit(run(args, prog_name))


def _open_stderr() -> None:
    """It was closed before the start (`2>&-`): words would go to stdout, and the next file that is opened would be descriptor 2."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    if null > 2:
        os.close(null)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def run(args: Sequence[str] | None = None, prog_name: str = "memopt") -> int:
    """Run the command line `args` and return the exit code. A command may return its code, or exit by itself."""
    if sys.stderr is None:
        _open_stderr()
    try:
        code = group.main(args, prog_name, standalone_mode=False)
        if sys.stdout is sys.__stdout__ and sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()  # one of the script's own is left to the interpreter
    except MemoptError as error:
        say(str(error))
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        say(str(_in_three_parts(error)))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        _die_of_interrupt()
    except BrokenPipeError:
        _leave_stdout()  # the reader (`| head`) has seen enough
        return 1
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        _leave_stdout()
        told = MemoptError(
            "what was asked for could not be written", why=str(error), try_="a disk with room for it"
        )
        say(str(told))
        return told.exit_code
    return code if isinstance(code, int) else 0


def _in_three_parts(error: click.ClickException) -> MemoptError:
    """What click found wrong with the command line, in the form of our own errors."""
    context = getattr(error, "ctx", None)
    if context is None:
        return UsageError(error.format_message(), try_="memopt --help")
    what = error.format_message()
    if isinstance(error, click.NoSuchOption) and context.info_name == "apply":
        return UsageError(
            what,
            why="what the script is to be given follows --",
            try_=f"memopt apply PLAN -- {error.option_name} ..., or memopt apply --help",
        )
    return UsageError(what, why=context.get_usage(), try_=f"{context.command_path} --help")


def _leave_stdout() -> None:
    """Keep the interpreter's last flush from complaining of what cannot be written any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _die_of_interrupt() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(128 + signal.SIGINT)
