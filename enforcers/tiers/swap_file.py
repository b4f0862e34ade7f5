"""One swap file: without a name where the system can (O_TMPFILE, or unlinked right after it is opened), past the page cache
where the file system can (O_DIRECT), locked for as long as it lives.

So kill -9 leaves nothing behind; what an unlucky moment may leave between open and unlink is recognised by its name
(`memopt-swap-<pid>-<random>.bin`), a dead process id and a lock that nobody holds, and removed by the next run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from memopt.enforcers.tiers.swap import SwapFailed
from memopt.errors import reason

PAGE_BYTES = 4096
"""O_DIRECT wants offsets, lengths and addresses in multiples of the device's block; every block size in use divides this."""

_NAME = re.compile(r"memopt-swap-(\d{1,10})-[0-9a-f]{16}\.bin")
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV, errno.ESPIPE}
_IN_MEMORY = {"tmpfs", "ramfs"}
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class SwapFile:
    """An open swap file in `folder`. Raises `SwapFailed` where there cannot be one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.size_bytes = 0
        try:
            self.fd = _open_unnamed(folder)
        except OSError as error:
            raise _failed(f"no swap file can be made in {folder}", error) from error
        self.direct = _go_direct(self.fd)

    def grow(self, by_bytes: int) -> None:
        """Make room at the end now, so that a full disk is noticed before anything is moved."""
        try:
            _allocate(self.fd, self.size_bytes, by_bytes)
        except OSError as error:
            raise _failed(
                f"the swap file in {self.folder} cannot grow to {self.size_bytes + by_bytes} bytes", error
            ) from error
        self.size_bytes += by_bytes

    def write(self, data: memoryview, offset: int) -> None:
        """All of `data` at `offset`."""
        done = 0
        try:
            while done < len(data):
                wrote = self._whole_pages(os.pwrite, data[done:], offset + done)
                if wrote == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += wrote
        except OSError as error:
            raise _failed(f"cannot write to the swap file in {self.folder}", error) from error

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into` from `offset`."""
        done = 0
        try:
            while done < len(into):
                got = self._whole_pages(_read_into, into[done:], offset + done)
                if got == 0:
                    raise OSError(errno.EIO, "the swap file is shorter than what was written to it")
                done += got
        except OSError as error:
            raise _failed(f"cannot read back from the swap file in {self.folder}", error) from error

    def _whole_pages(self, act: Callable[[int, memoryview, int], int], data: memoryview, offset: int) -> int:
        """One system call; where O_DIRECT turns out to be refused after all, go on through the page cache."""
        try:
            moved = act(self.fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self._leave_direct()
            return act(self.fd, data, offset)
        if moved % PAGE_BYTES and moved < len(data) and self.direct:
            self._leave_direct()
        return moved

    def _leave_direct(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~_O_DIRECT)
        self.direct = False

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def _read_into(fd: int, into: memoryview, offset: int) -> int:
    return os.preadv(fd, [into], offset)


def _open_unnamed(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE") and folder.is_dir():
        try:
            return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
    path = folder / f"memopt-swap-{os.getpid()}-{secrets.token_hex(8)}.bin"
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: the process id in the name has to do
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.unlink(path)
    return fd


def _go_direct(fd: int) -> bool:
    """O_DIRECT from here on, if the file system has it."""
    if not _O_DIRECT:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
    except OSError:
        return False
    return True


def _allocate(fd: int, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except AttributeError:
        os.ftruncate(fd, start + nbytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(fd, start + nbytes)


def _failed(what: str, error: OSError) -> SwapFailed:
    hints = {
        errno.ENOSPC: "free some space, or another --swap-dir",
        errno.EDQUOT: "free some space, or another --swap-dir",
        errno.ENOENT: "mkdir -p the folder, or another --swap-dir",
        errno.EFBIG: "ulimit -f unlimited, or another --swap-dir",
    }
    return SwapFailed(what, why=reason(error), try_=hints.get(error.errno or 0, "another --swap-dir"))


def filesystem_of(folder: Path) -> str:
    """The type of the file system under `folder` (`ext4`, `tmpfs`), or `""` where the system does not tell."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        parents = {str(folder.resolve()), *map(str, folder.resolve().parents)}
    except OSError:
        return ""
    best, kind = "", ""
    for line in mounts:
        fields = line.split(" ")
        place = fields[1].replace("\\040", " ") if len(fields) > 2 else ""
        if place in parents and len(place) >= len(best):
            best, kind = place, fields[2]
    return kind


def is_in_memory(folder: Path) -> bool:
    """Whether files in `folder` are themselves memory, so that swapping to them would free none."""
    return filesystem_of(folder) in _IN_MEMORY


def remove_leftovers(folder: Path) -> int:
    """Unlink swap files of dead processes in `folder`; the bytes that this gave back."""
    freed_bytes = 0
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    for name in names:
        match = _NAME.fullmatch(name)
        if match and not _is_alive(int(match[1])):
            freed_bytes += _remove_unlocked(folder / name)
    return freed_bytes


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _remove_unlocked(path: Path) -> int:
    """The process id may be another container's: only a file whose lock nobody holds is a leftover."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            return 0
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        return 0
    finally:
        os.close(fd)
    return facts.st_blocks * 512
