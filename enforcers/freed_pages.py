"""On a CPU: keep the pages that a planned run frees, for what it allocates next.

glibc gives the top of its heap back to the system once 64 MiB of it are free, and maps large blocks anew each time. A plan frees
and makes tensors all through the step, so the same pages would be faulted in over and over: on ResNet-50 at 60 % of its peak
that cost twice what the plan itself does. Kept, as the CUDA caching allocator keeps its segments, they cost nothing. But a heap
that never shrinks is cut into pieces that fit nothing, and grows from iteration to iteration (four layers whose tensors came to
64 MiB: by 570 MB in 54 steps): where it has come to more than the plain run would need, all that is free goes back to the system.
Whoever has set `MALLOC_*` or `GLIBC_TUNABLES` is left alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

from memopt.instrument.memory.outside import give_back_free_pages, resident_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)"""
_NEVER = -1
_MOST_MMAP_THRESHOLD = 32 << 20
"""The largest that glibc takes, and what it comes to by itself when blocks of this size are freed."""
_FIRST = 2
"""The iteration, of those under the plan, after which free pages go back for the first time, to see what is in use."""
_PIECES = 1.5
"""Times the plain peak: so much may be resident beside what is in use between iterations, as a plain run's heap has pieces that fit nothing, too."""
_SLACK_BYTES = 64 << 20
"""And so much that is no tensor's."""


def keep_freed_pages(environment: Mapping[str, str] = os.environ) -> bool:
    """Ask glibc to; False where there is no glibc, or the user has settings of their own."""
    if platform.libc_ver()[0] != "glibc" or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environment
    ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


class FreedPages:
    """Those of a planned run, whose plain peak is `plain_bytes`. Made where `keep_freed_pages` was possible."""

    def __init__(self, plain_bytes: int) -> None:
        self._spare_bytes = int(_PIECES * plain_bytes) + _SLACK_BYTES
        self._iterations = 0
        self._in_use_bytes = 0
        """Resident when all free pages had gone back."""

    def iteration_ended(self) -> None:
        """Give free pages back, if there are too many."""
        self._iterations += 1
        if self._iterations == _FIRST or (
            self._in_use_bytes and resident_bytes() > self._in_use_bytes + self._spare_bytes
        ):
            give_back_free_pages()
            self._in_use_bytes = resident_bytes()
