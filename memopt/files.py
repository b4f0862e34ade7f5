"""Reading and writing what memopt keeps: whole files or none, never over an existing one unasked."""

from __future__ import annotations

import errno
import gzip
import io
import os
import shlex
import tempfile
import zlib
from pathlib import Path

from memopt.errors import BadFile, UsageError, reason

MOST_BYTES = 4 * 2**30
"""No profile, plan or graph is larger than this when unpacked; a larger one is refused unread."""
MOST_RATIO = 100
"""No file of memopt's packs better than this (profiles: 10 to 40 times); one that does, and is large, is refused early."""
_CHUNK_BYTES = 2**24

_GZIP = b"\x1f\x8b"


def refuse_overwrite(path: Path, *, force: bool) -> None:
    """Raise `UsageError` when `path` could not be written: it exists (without `force`), or its folder does not."""
    if path.name == "-":
        raise UsageError("a file cannot be called -", why="nothing is written to stdout", try_="-o FILE")
    try:
        is_folder, is_file, exists = path.is_dir(), path.is_file(), path.exists()
    except (OSError, ValueError) as error:  # too long, a folder that may not be searched, a zero byte
        raise UsageError(f"cannot write {path}", why=reason(error), try_="-o FILE") from error
    if is_folder:
        raise UsageError(f"cannot write {path}", why="it is a folder", try_="-o FILE")
    if exists and not is_file:  # the rename would put a file in its place
        raise UsageError(f"cannot write {path}", why="it is a device, a pipe or a socket", try_="-o FILE")
    if exists and not force:
        raise UsageError(
            f"{path} exists already",
            why="nothing is overwritten unasked",
            try_="--force, or the name of another file",
        )
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(
            f"cannot write {path}",
            why=f"there is no folder {folder}",
            try_=f"mkdir -p {shlex.quote(str(folder))}",
        )
    if not os.access(folder, os.W_OK):
        raise UsageError(
            f"cannot write {path}",
            why=f"nothing can be written in the folder {folder}",
            try_="-o FILE in another folder",
        )


def swap_folder(given: Path | None) -> Path:
    """Where swapped tensors go: the folder `given`, else the system's for temporary files (TMPDIR); absolute."""
    return (given or Path(tempfile.gettempdir())).absolute()


def write_atomic(path: Path, data: bytes) -> None:
    """`data` at `path`, whole or not at all: temporary file beside it, fsync, rename."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise BadFile(f"cannot write {path}", why=reason(error), try_="-o FILE in another folder") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        raise BadFile(f"cannot write {path}", why=reason(error), try_="-o FILE in another folder") from error
    finally:
        Path(name).unlink(missing_ok=True)


def read_bytes(path: Path, kind: str) -> bytes:
    """The bytes of the file at `path`, gunzipped if need be; `kind` names what it should be, for the error.

    Raises `UsageError` where there is nothing to read, `BadFile` for a file that cannot be unpacked.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {kind} {path}", why=reason(error), try_=f"the path of a {kind}"
        ) from error
    if not raw.startswith(_GZIP):
        return raw
    try:
        return unpack(raw, path, kind)
    except (OSError, EOFError, zlib.error) as error:
        raise BadFile(
            f"{path} is not a whole {kind}",
            why=f"it cannot be unpacked: {error}",
            try_=f"write the {kind} again",
        ) from error


def unpack(raw: bytes, path: Path, kind: str) -> bytes:
    """What `raw` unpacks to, as far as that can be a file of ours."""
    data = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        while chunk := file.read(_CHUNK_BYTES):
            data += chunk
            if len(data) > MOST_BYTES or len(data) > max(4 * _CHUNK_BYTES, MOST_RATIO * len(raw)):
                raise BadFile(
                    f"{path} is no usable {kind}",
                    why=f"its {len(raw)} bytes unpack to more than {len(data)}",
                    try_=f"write the {kind} again",
                )
    return bytes(data)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
