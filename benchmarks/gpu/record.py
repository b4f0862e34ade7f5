"""Record all configurations, each in a process of its own, within a time: what is there already is not done again."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.configurations import CONFIGURATIONS

ROOT = Path(__file__).resolve().parents[2]
FILE = "runs.jsonl.gz"


def record(folder: Path, names: list[str], *, limit_s: float, run_limit_s: float, at_once: int = 1) -> int:
    """Add the runs still missing to the file in `folder`, `at_once` at a time. Returns how many of `names` are not there at the end."""
    end = time.monotonic() + limit_s
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if name not in recorded(folder / FILE)]
    writing = threading.Lock()

    def one(name: str) -> bool:
        rest_s = end - time.monotonic()
        if rest_s < run_limit_s / 4:
            return False
        found = run_alone([sys.executable, "-m", "benchmarks.gpu.measure", name], min(run_limit_s, rest_s))
        if isinstance(found, str):
            print(f"{name}: {found}", flush=True)
            return False
        with writing:
            append(folder / FILE, found)
        print(f"{name}: {found['status']}, reserved {found['reserved_bytes'] / 2**20:.0f} MiB", flush=True)
        return True

    with ThreadPoolExecutor(at_once) as pool:
        left = list(pool.map(one, missing)).count(False)
    if left:
        print(f"{left} configurations are left: the same command goes on with them")
    return left


def run_alone(command: list[str], limit_s: float) -> dict[str, Any] | str:
    """What the process tells in its last line, or why it tells nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return f"not done in {limit_s:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode != 0:
        return lines[-1] if lines else f"ended with {done.returncode}"
    return dict(json.loads(lines[-1]))


def append(path: Path, run: dict[str, Any]) -> None:
    """Add a run to the file as a gzip member of its own; the file is whole at every moment."""
    line = json.dumps(run, separators=(",", ":")).encode() + b"\n"
    before = path.read_bytes() if path.exists() else b""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(before + gzip.compress(line, mtime=0))
    os.replace(fresh, path)


def recorded(path: Path) -> set[str]:
    """Names of the runs in the file."""
    if not path.exists():
        return set()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return {json.loads(line)["name"] for line in lines}


def chosen(only: list[str]) -> list[str]:
    """The configurations whose name holds one of the words in `only`; all without any."""
    return [name for name in CONFIGURATIONS if not only or any(word in name for word in only)]
