"""On a CPU: keep the pages that a planned run frees, for what it allocates next.

glibc gives the top of its heap back to the system once 64 MiB of it are free, and maps large blocks anew each time. A plan frees
and makes tensors all through the step, so the same pages would be faulted in over and over: on ResNet-50 at 60 % of its peak
that cost twice what the plan itself does. Kept, as the CUDA caching allocator keeps its segments, they cost nothing; the
resident set still falls along with the peak. Whoever has set `MALLOC_*` or `GLIBC_TUNABLES` is left alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)"""
_NEVER = -1
_MOST_MMAP_THRESHOLD = 32 << 20
"""The largest that glibc takes, and what it comes to by itself when blocks of this size are freed."""


def keep_freed_pages(environment: Mapping[str, str] = os.environ) -> bool:
    """Ask glibc to; False where there is no glibc, or the user has settings of their own."""
    if platform.libc_ver()[0] != "glibc" or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environment
    ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
