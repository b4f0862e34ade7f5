"""Which files are memopt's own: one that it wrote for the same script (or graph) before is written anew without asking."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memopt.errors import MemoptError
from memopt.files import read_bytes, refuse_overwrite
from memopt.trace import Script


class _Written(msgspec.Struct):
    schema: str = ""
    script: Script = Script(argv=[], cwd="")
    graph: str = ""


def refuse_foreign(
    path: Path, family: str, *, script: Script | None = None, graph: str = "", force: bool = False
) -> None:
    """As `refuse_overwrite`, but a file of the `family` (`memopt.plan`) that was written for this script, or this graph, may go."""
    refuse_overwrite(path, force=force or _is_ours(path, family, script, graph))


def _is_ours(path: Path, family: str, script: Script | None, graph: str) -> bool:
    try:
        if not path.is_file():
            return False
        found = msgspec.json.decode(read_bytes(path, "file"), type=_Written)
    except (OSError, ValueError, RecursionError, MemoptError, msgspec.MsgspecError):
        return False
    if found.schema.partition("/")[0] != family:
        return False
    if script is None:
        return bool(graph) and found.graph == graph
    return bool(found.script.argv) and _identity(found.script.read_from(path)) == _identity(script)


def _identity(script: Script) -> tuple[str, ...]:
    """The script's file; a module by its name and the folder in which it was run."""
    if script.as_module:
        return "-m", script.argv[0], script.cwd
    return (str(Path(script.cwd, script.argv[0])),)
