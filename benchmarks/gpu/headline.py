"""Peak and step time on a GPU: plain, memopt at 50 and 30 % of the plain peak, and what people do by hand."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

MODELS = {"gpt2": "gpt2 16 bf16 adamw-fused", "resnet50": "resnet50 256 amp-fp16 sgd", "llama": "llama-3.2-1b 8 bf16 adamw-fused"}  # fmt: skip
PEERS = ("checkpoint", "save_on_cpu")
BUDGETS = ("100%", "50%", "30%")
DRY_BUDGETS = ("100%", "min")
"""Tiny models are parameters for the most part: half their peak cannot be met."""
Found = dict[str, Any]


def runs() -> Iterator[tuple[str, float, Callable[[], Found]]]:
    """(name, limit, function), the most telling first."""
    for name, words in MODELS.items():
        yield f"headline {name}", 190, partial(headline, words)


def headline(words: str) -> Found:
    """All runs of one model, in turn."""
    from benchmarks.gpu.jobs import MEMOPT, dry, execute, script_of

    budgets = DRY_BUDGETS if dry() else BUDGETS
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        script = [*script_of(words), "--tell"]
        python = [MEMOPT[0], *script]
        found["plain"] = _told(execute(python, folder)[0])
        for peer in PEERS:
            out, err, code = execute([*python, "--peer", peer], folder, may_fail=True)
            found[peer] = _told(out) if code == 0 else {"error": err[-400:]}
        _, err, code = execute(
            [*MEMOPT, "profile", "-o", "run.profile.json.gz", *script], folder, may_fail=True
        )
        if not (Path(folder) / "run.profile.json.gz").exists():
            return found | {"failed": f"no profile ({code}): {err[-1500:]}"}
        with ThreadPoolExecutor(len(budgets)) as planners:
            said = dict(zip(budgets, planners.map(partial(_advised, folder=folder), budgets), strict=True))
        for budget in budgets:
            found[budget] = (
                {"refused": said[budget]}
                if said[budget]
                else _with_plan(budget, folder, verify=budget == budgets[1])
            )
        found["plain again"] = _told(execute(python, folder)[0])
    losses = found["plain"]["losses"]
    for each in found.values():
        if "losses" in each:
            each["same_losses"] = each.pop("losses") == losses
    return found


def _plan_of(budget: str) -> str:
    return f"{budget.rstrip('%')}.plan.json"


def _advised(budget: str, folder: str) -> str:
    """Why there is no plan; empty where there is one."""
    from benchmarks.gpu.jobs import MEMOPT, execute

    words = ["advise", "run.profile.json.gz", "--budget", budget, "-o", _plan_of(budget)]
    _, err, code = execute([*MEMOPT, *words], folder, may_fail=True)
    return err[-700:] if code else ""


def _with_plan(budget: str, folder: str, *, verify: bool) -> Found:
    from benchmarks.gpu.jobs import MEMOPT, execute

    plan = _plan_of(budget)
    out, err, code = execute([*MEMOPT, "apply", plan, "--outcome", f"{plan}.out"], folder, may_fail=True)
    if code:
        return {"error": err[-1500:]}
    outcome = json.loads((Path(folder) / f"{plan}.out").read_text())
    outcome["verify"] = ""
    if verify:
        words = ["apply", plan, "--verify", "2", "--deterministic"]
        _, err, code = execute([*MEMOPT, *words], folder, may_fail=True)
        outcome["verify"] = err[-300:] if code else "identical"
    kinds: dict[str, int] = {}
    for action in json.loads((Path(folder) / plan).read_text())["actions"]:
        kinds[action["kind"]] = kinds.get(action["kind"], 0) + 1
    return _told(out) | {"outcome": outcome, "kinds": kinds}


def _told(out: str) -> Found:
    """What `train.py --tell` said in its last line."""
    found = dict(json.loads(out.strip().splitlines()[-1]))
    times = found.pop("step_ms")
    return found | {"step_ms": round(statistics.median(times[4:]), 2)}


def words(found: Found) -> str:
    plain = found.get("plain", {})
    lines = []
    for name, each in found.items():
        if not isinstance(each, dict) or "step_ms" not in each:
            lines.append(f"  {name:12s} {str(each)[:300]}")
            continue
        outcome = each.get("outcome", {})
        told = ""
        if outcome:
            told = f" predicted {outcome['predicted_peak_bytes'] / 2**20:.0f} MiB {outcome['predicted_step_ms']:.1f} ms, measured {(outcome['measured_peak_bytes'] or 0) / 2**20:.0f} MiB {outcome['measured_step_ms'] or 0:.1f} ms, {outcome['actions']['done']}/{outcome['actions']['planned']} {each['kinds']} {outcome['notes']} {outcome['verify']}"  # fmt: skip
        lines.append(
            f"  {name:12s} {each['allocated'] / 2**20:8.0f} MiB ({each['allocated'] / plain['allocated']:.0%}) reserved {each['reserved'] / 2**20:.0f} {each['step_ms']:8.1f} ms ({each['step_ms'] / plain['step_ms']:.2f}) same {each.get('same_losses')}{told}"
        )  # fmt: skip
    return "\n" + "\n".join(lines)
