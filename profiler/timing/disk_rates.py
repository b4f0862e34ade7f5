"""What a folder's disk does: bytes per second written and read. Without torch: a process beside the script's may measure it."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from pathlib import Path

Rates = tuple[float, float]
"""Written and read, bytes per second."""
_DISK_BYTES = 48 * 2**20
_CHUNK_BYTES = 4 * 2**20


def measure_disk(folder: Path) -> Rates:
    """Bytes per second written to and read from `folder`, past the page cache where it allows; zeros when it cannot be written."""
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix="memopt-measure-")
        os.close(handle)
        try:
            return _time_file(name)
        finally:
            os.unlink(name)
    except OSError:
        return 0.0, 0.0


def _time_file(name: str) -> Rates:
    buffer = mmap.mmap(-1, _CHUNK_BYTES)
    buffer.write(os.urandom(2**16) * (_CHUNK_BYTES // 2**16))
    try:
        descriptor = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        descriptor = os.open(name, os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, _DISK_BYTES)
        offsets = range(0, _DISK_BYTES, _CHUNK_BYTES)
        begin = time.perf_counter()
        for offset in offsets:
            os.pwrite(descriptor, buffer, offset)
        os.fdatasync(descriptor)
        middle = time.perf_counter()
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, _DISK_BYTES, os.POSIX_FADV_DONTNEED)
        for offset in offsets:
            os.preadv(descriptor, [buffer], offset)
        end = time.perf_counter()
    finally:
        os.close(descriptor)
    return _DISK_BYTES / (middle - begin), _DISK_BYTES / (end - middle)
