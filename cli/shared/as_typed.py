"""What follows memopt's own options: a script with its arguments, or the whole command that a person had typed before memopt.

`memopt run --budget 16GB python train.py` runs `train.py`; a launcher (`torchrun`, `accelerate launch`) is started instead of this
process, with memopt in each process that it starts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from memopt.errors import UsageError
from memopt.instrument.script.command import Command

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
_LAUNCHERS = {
    ("torchrun",): "torch.distributed.run",
    ("-m", "torch.distributed.run"): "torch.distributed.run",
    ("-m", "torch.distributed.launch"): "torch.distributed.launch",
    ("accelerate", "launch"): "accelerate.commands.launch",
    ("accelerate-launch",): "accelerate.commands.launch",
    ("-m", "accelerate.commands.launch"): "accelerate.commands.launch",
}
"""As they are typed -> the module that launches. Each takes `-m` for a module in place of a script."""
_MOST_HEAD = 256


def command_as_typed(words: Sequence[str], *, as_module: bool) -> Command:
    """The script or, with `as_module`, the module that `words` begin with; a launcher takes the place of this process, and nothing returns.

    Raises `UsageError` for options of python's own, a python that is not memopt's, and a launcher without a script."""
    typed = list(words)
    if as_module:
        typed.insert(0, "-m")
    elif _is_python(typed[0]):
        typed = _without_python(typed)
    for name, module in _LAUNCHERS.items():
        if tuple(typed[: len(name)]) == name:
            _launch(module, typed[len(name) :], _own_words(len(words), as_module=as_module))
    if typed[0] == "-m":
        return Command(tuple(typed[1:]), as_module=True)
    return Command((_on_path(typed[0]), *typed[1:]))


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(Path(word).name) is not None and not (
        word == Path(word).name and Path(word).is_file()
    )


def _without_python(typed: list[str]) -> list[str]:
    """A script, or `-m` and a module, that the python in `typed` would run."""
    words = shlex.join(typed)
    found = shutil.which(typed[0])
    if found is None or not _is_ours(Path(found)):
        raise UsageError(
            f"cannot run {words}",
            why=f"{typed[0]} is {found or 'not here'}, and memopt belongs to {sys.executable}, which runs the script",
            try_="the script without python before it, or memopt installed there",
        )
    rest = typed[1:]
    if rest[:1] == ["-u"]:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        rest = rest[1:]
    if not rest or (rest[0].startswith("-") and not (rest[0] == "-m" and len(rest) > 1)):
        raise UsageError(
            f"cannot run {words}",
            why="a script is needed, or -m and a module"
            if not rest or rest[0] in ("-", "-c", "-m")
            else f"{rest[0]} is an option of python's own",
            try_="the path of a Python script; options of python's own go before memopt: python -O -m memopt ...",
        )
    return rest


def _is_ours(python: Path) -> bool:
    ours = Path(sys.executable)
    if python.parent.resolve() == ours.parent.resolve():
        return True
    return sys.prefix == sys.base_prefix and python.resolve() == ours.resolve()


def _own_words(count: int, *, as_module: bool) -> list[str]:
    """Memopt's command and options, as typed before the last `count` words of the command line."""
    own = sys.argv[1 : len(sys.argv) - count]
    own = own[:-1] if own[-1:] == ["--"] else own
    return own[:-1] if as_module else own


def _launch(module: str, typed: list[str], own: list[str]) -> None:
    """Become the launcher, with memopt before the script that `typed` names."""
    from memopt.cli.shared.console import say

    at = next((i for i, word in enumerate(typed) if word in ("-m", "--module") or _is_script(word)), None)
    if at is None:
        raise UsageError(
            f"cannot tell which script {module} is to launch",
            why="no word after it is the path of a Python script, or -m and a module",
            try_=f"the launcher first: ... -m memopt {shlex.join(own)} SCRIPT",
        )
    script = typed[at:] if _is_script(typed[at]) else ["-m", *typed[at + 1 :]]
    words = [sys.executable, "-m", module, *typed[:at], "-m", "memopt", *own, *script]
    say(f"starting {shlex.join(['python', *words[1:]])}")
    sys.stdout.flush()
    os.execv(words[0], words)


def _is_script(word: str) -> bool:
    return word.endswith(".py") and Path(word).is_file()


def _on_path(name: str) -> str:
    """A program that is no file here but lies on PATH, where that is a script of this Python's; else `name`."""
    if os.path.exists(name) or Path(name).name != name:
        return name
    found = shutil.which(name)
    if found is None:
        return name
    with open(found, "rb") as file:
        head = file.read(_MOST_HEAD).split(b"\n", 1)[0]
    return found if head.startswith(b"#!") and _is_ours(Path(os.fsdecode(head[2:].strip()))) else name
