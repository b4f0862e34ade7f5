"""What memopt's files have in common: the `schema` that says which kind of file it is, and which version of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TypeVar

import msgspec

from memopt.errors import BadFile

T = TypeVar("T")

_WRITTEN = "a file that memopt profile or memopt advise wrote"
_KINDS = {
    "memopt.trace": ("a profile", "memopt advise {}"),
    "memopt.plan": ("a plan", "memopt apply {}; or the profile that it was made from"),
    "memopt.graph": ("a plain graph", "memopt advise --graph {}"),
    "memopt.schedule": ("the schedule of a plain graph", _WRITTEN),
    "memopt.outcome": ("the outcome of memopt apply", _WRITTEN),
}
"""What a file of memopt's may be, and what it is for."""


class _Versioned(msgspec.Struct):
    schema: str = ""


def schema_of(data: bytes) -> str:
    """The schema that `data` names; empty where it names none. Raises what `msgspec.json.decode` does."""
    return msgspec.json.decode(data, type=_Versioned).schema


def decode_versioned(data: bytes, kind: type[T], schema: str, path: Path, name: str) -> T:
    """`data` as a `kind` whose `schema` field is `schema`. Raises `BadFile` that says what is wrong and where."""
    again = f"memopt {'profile SCRIPT' if name == 'profile' else 'advise PROFILE'}, to write it again"
    try:
        found = schema_of(data)
        if found == schema:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"{path} is not a {name}", why=str(error) or "nested too deeply", try_=again) from error
    family, _, version = found.rpartition("/")
    if family != schema.rpartition("/")[0] or not family:
        what, meant = _KINDS.get(family, ("", again))
        why = f"it is {what}" if what else f"its schema is '{found[:60]}', not '{schema}'"
        raise BadFile(f"{path} is not a {name}", why=why, try_=meant.format(shlex.quote(str(path))))
    raise BadFile(
        f"{path} is a {name} of version {version[:20]}",
        why=f"this memopt reads version {schema.rpartition('/')[2]}",
        try_=f"the memopt that wrote it, or {again}",
    )
