"""Pages that a planned run frees are kept for what it allocates next, unless the user has said otherwise."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from memopt.enforcers.freed_pages import keep_freed_pages

CHILD = """
import sys
from pathlib import Path
from memopt.enforcers.freed_pages import keep_freed_pages
if sys.argv[1] == "keep":
    assert keep_freed_pages({})
import torch
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = resident()
blocks = [torch.ones(25 << 18) for _ in range(8)]  # 25 MiB each: more than glibc keeps by itself, less than it can be asked to
blocks.clear()
print(resident() - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


def still_resident_bytes(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", CHILD, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@glibc
def test_pages_stay_when_blocks_are_freed() -> None:
    assert still_resident_bytes("keep") > 150 << 20
    assert still_resident_bytes("leave") < 50 << 20


@glibc
@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_settings_stay(name: str) -> None:
    assert not keep_freed_pages({name: "1"})


IN_TURN = """
from memopt.enforcers.freed_pages import FreedPages, keep_freed_pages
from memopt.instrument.memory.outside import resident_bytes
assert keep_freed_pages({})
import torch
pages = FreedPages(64 << 20)  # 96 MiB, and 64 more, may stay
for _ in range(2):
    pages.iteration_ended()
least = resident_bytes()
for mib in (100, 400, 100):
    blocks = [torch.ones(1 << 18) for _ in range(mib)]
    blocks.clear()
    pages.iteration_ended()
    print((resident_bytes() - least) >> 20)
"""


@glibc
def test_a_heap_that_has_grown_gives_back_what_is_free() -> None:
    done = subprocess.run([sys.executable, "-c", IN_TURN], capture_output=True, text=True, check=True)
    few, many, few_again = map(int, done.stdout.split())
    assert 90 < few < 130
    assert many < 20
    assert 90 < few_again < 130
