"""`memopt run` as a person calls it, on scripts of many kinds: the same output, within the budget, in the first run and in the next."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from memopt.trace import load_trace
from memopt.units import parse_bytes

RUNS = (
    ("gpt2 4 bf16 adamw", "50%"),
    ("opt-350m 2 amp-bf16 adamw-fused", "40%"),
    ("language adamw large", "60%"),
    ("lora adamw large", "50%"),
    ("mlp adamw large", "40%"),
    ("recurrent adamw large", "60%"),
    ("cnn sgd large", "60%"),
    ("gan adam-foreach large", "60%"),
    ("autoencoder adamw large", "50%"),
    ("residual adamw large", "40%"),
    ("lengths adamw large", "60%"),
    ("resnet50 32 amp-fp16 sgd", "50%"),
)
"""A configuration of `configurations` or of `benchmarks.run_scripts`, and the share of its peak that it gets."""
Found = dict[str, Any]


def runs() -> Iterator[tuple[str, Callable[[], Found]]]:
    """(name, function)."""
    for words, budget in RUNS:
        yield f"run {words} {budget}", partial(run, words, budget)
    yield "run guarded", partial(guarded, "language adamw large", "60%")


def _script(words: str) -> list[str]:
    from benchmarks.gpu.jobs import dry, script_of
    from benchmarks.run_scripts import KINDS

    kind, *rest = words.split()
    if kind in (*KINDS, "gan"):
        rest = [rest[0], "small" if dry() else rest[1]]
        return ["-m", "benchmarks.run_scripts", kind, *rest, "12"]
    return [*script_of(words), "--digest"]


def run(words: str, budget: str) -> Found:
    """Plain, then `memopt run` twice, as `benchmarks.run` does it; `repeats`: plain prints the same twice."""
    from benchmarks.run import line, one

    script = _script(words)
    options = argparse.Namespace(bytes=False, time_limit=4.0)
    found = one(script, budget, options)
    found["line"] = line(words, budget, found)
    if found.get("same") is not True:
        with tempfile.TemporaryDirectory() as folder:
            found["repeats"] = _plain(script, folder) == _plain(script, folder)
    if "problem" in found or (not found["same"] and found["repeats"]):
        found["failed"] = found.get("problem") or "other output than plain python's"
    return found


def guarded(words: str, budget: str) -> Found:
    """`memopt run --online`: no plan, saved tensors and states go whenever the budget would be passed."""
    from benchmarks.gpu.jobs import MEMOPT, execute

    script = _script(words)
    with tempfile.TemporaryDirectory() as folder:
        plain = _plain(script, folder)
        execute([*MEMOPT, "profile", "-q", "-o", "run.profile.json.gz", *script], folder)
        peak = load_trace(Path(folder) / "run.profile.json.gz").peak_bytes
        limit = str(parse_bytes(budget, of_bytes=peak))
        out, err, code = execute([*MEMOPT, "run", "--online", "--budget", limit, "--outcome", "o.json", *script], folder, may_fail=True)  # fmt: skip
        told = Path(folder) / "o.json"
        found: Found = {"exit": code, "same": out == plain, "plain": peak, "budget": limit, "words": err.splitlines()[-6:]}  # fmt: skip
        found["guards"] = json.loads(told.read_text())["guards"] if told.exists() else None
    if code or out != plain:
        found["failed"] = "other output than plain python's"
    return found


def _plain(script: list[str], folder: str) -> str:
    from benchmarks.gpu.jobs import execute

    return execute([sys.executable, *script], folder, may_fail=True)[0]


def words(found: Found) -> str:
    """For the campaign's line."""
    told = found.get("line") or f"{found.get('budget')} of {found.get('plain')} bytes, same {found.get('same')}: {found.get('words')}"  # fmt: skip
    return f"{found['failed']}; {told}" if "failed" in found else str(told)
