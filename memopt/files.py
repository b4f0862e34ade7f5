"""Reading and writing what memopt keeps: whole files or none, never over an existing one unasked."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
from pathlib import Path

from memopt.errors import BadFile, UsageError

MOST_BYTES = 4 * 2**30
"""No profile, plan or graph is larger than this when unpacked; a larger one is refused unread."""

_GZIP = b"\x1f\x8b"


def refuse_overwrite(path: Path, *, force: bool) -> None:
    """Raise `UsageError` when `path` could not be written: it exists (without `force`), or its folder does not."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}", why="it is a folder", try_="-o FILE")
    if path.exists() and not force:
        raise UsageError(
            f"{path} exists already", why="nothing is overwritten unasked", try_="--force, or -o another-file"
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"cannot write {path}", why=f"there is no folder {path.parent}", try_=f"mkdir -p {path.parent}"
        )
    if not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"cannot write {path}",
            why=f"the folder {path.parent} is read-only",
            try_="-o FILE in another folder",
        )


def write_atomic(path: Path, data: bytes) -> None:
    """`data` at `path`, whole or not at all: temporary file beside it, fsync, rename."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise BadFile(f"cannot write {path}", why=str(error), try_="-o FILE in another folder") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        raise BadFile(f"cannot write {path}", why=str(error), try_="-o FILE in another folder") from error
    finally:
        Path(name).unlink(missing_ok=True)


def read_bytes(path: Path, kind: str) -> bytes:
    """The bytes of the file at `path`, gunzipped if need be; `kind` names what it should be, for the error."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadFile(
            f"cannot read {kind} {path}", why=error.strerror or str(error), try_="memopt --help"
        ) from error
    if not raw.startswith(_GZIP):
        return raw
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise BadFile(
            f"{path} is not a whole {kind}",
            why=f"it cannot be unpacked: {error}",
            try_=f"write the {kind} again",
        ) from error
    if len(data) > MOST_BYTES:
        raise BadFile(f"{path} is not a {kind}", why="it unpacks to more than 4 GiB")
    return data


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
