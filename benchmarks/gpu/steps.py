"""Where a step's time goes under a plan (of `advise`, or every action of one kind): its step predicted and measured, and what `look` finds in both
runs."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.look import LOOKS, STEPS

PLANS = (
    ("gpt2 16 bf16 adamw-fused", "58%"),
    ("opt-350m 2 amp-bf16 adamw-fused", "40%"),
    ("vit 16 amp-bf16 adamw", "60%"),
    ("resnet50 32 amp-fp16 sgd", "50%"),
)
KINDS = ("one", "recompute", "weights", "compress", "swap-host")
"""Of `everything`: what each kind of action costs by itself."""
Found = dict[str, Any]


def runs() -> Iterator[tuple[str, Callable[[], Found]]]:
    """(name, function)."""
    for words, budget in PLANS:
        yield f"step {words} {budget}", partial(step, words, budget=budget)
    words, _ = PLANS[0]
    for kind in KINDS:
        yield f"every action of a kind, alone: {kind} {words}", partial(step, words, kind=kind)


def step(words: str, *, budget: str = "", kind: str = "") -> Found:
    """Profile, plan and apply one configuration: for a budget, or every action of one kind."""
    from benchmarks.gpu.jobs import MEMOPT, dry, execute, script_of

    script, budget = [*script_of(words), "--steps", "12"], "min" if dry() else budget
    advise = [*MEMOPT, "advise", "p.json.gz", "--budget", budget, "-o", "plan.json"]
    everything = [MEMOPT[0], "-m", "benchmarks.gpu.everything", "p.json.gz", kind, "plan.json"]
    with tempfile.TemporaryDirectory() as folder:
        execute([*MEMOPT, "profile", "-q", "-o", "p.json.gz", *script], folder)
        execute(everything if kind else advise, folder)
        plain = execute([MEMOPT[0], *script, "--tell"], folder)[0]
        found: Found = {"plain_ms": _unlooked(plain)}
        for look in LOOKS:
            apply = [*MEMOPT, "apply", "plan.json", "--outcome", f"{look}.json", "--", *script[2:], "--tell", "--look", look]  # fmt: skip
            out, err, _ = execute(apply, folder, may_fail=True)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            if len(lines) != 2:
                return found | {"failed": err[-1500:]}
            found[look] = lines[0]
            found[f"{look}_ms"] = _unlooked(out)
        found["outcome"] = json.loads((Path(folder) / "python.json").read_text())
    return found


def _unlooked(out: str) -> list[float]:
    """The median step that is not looked at, and all steps."""
    times = json.loads(out.strip().splitlines()[-1])["step_ms"]
    plain = [ms for number, ms in enumerate(times) if number > 3 and number not in STEPS]
    return [round(ms, 2) for ms in (statistics.median(plain), *times)]


def words(found: Found) -> str:
    """For the campaign's line."""
    if "outcome" not in found:
        return str(found)[:1500]
    outcome = found["outcome"]
    return (
        f"plain {found['plain_ms'][0]:.1f} ms, predicted {outcome['predicted_step_ms']:.1f}, "
        f"measured {found['python_ms'][0]:.1f} and {found['device_ms'][0]:.1f}, "
        f"{outcome['actions']['done']} actions, peak {outcome['measured_peak_bytes']} of {outcome['predicted_peak_bytes']}"
    )
