"""`memopt run` on scripts of many kinds: is a budget planned for and held, are the results the same, what does it cost?

    make bench-run                                                    # all kinds, optimizers and sizes at 60 % of the plain peak
    make bench-run ARGS="--kinds language lora --budgets 60% 45%"

Each script runs three times in processes of its own: plain; under `memopt run`, where it is recorded and its plan is made; and again,
enforced from the first iteration on. `held`: the measured peak of the enforced run is within the budget. `same`: both runs print what the
plain one does, losses, parameters, buffers and optimizer state to the last bit. Where the budget is not met, what holds the floor.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.run_scripts import KINDS, OPTIMIZERS, SIZES

ROOT = Path(__file__).parent.parent
_PLANNED_S = 120.0


def execute(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def one(kind: str, optimizer: str, size: str, budget: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one script three times."""
    script = ["-m", "benchmarks.run_scripts", kind, optimizer, size, str(args.steps)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = execute([sys.executable, *script], folder)
        if plain.returncode:
            return {"problem": plain.stderr.strip()[-200:]}
        run = [
            sys.executable,
            "-m",
            "memopt",
            "run",
            "--budget",
            budget,
            "--time-limit",
            str(args.time_limit),
        ]
        first = execute([*run, "--outcome", "first.json", *script], folder)
        _wait_for_plan(folder)
        second = execute([*run, "--outcome", "second.json", *script], folder)
        try:
            course = json.loads((folder / "second.json").read_text())
        except OSError:
            return {"problem": second.stderr.strip()[-200:]}
        return {
            "same": first.stdout == second.stdout == plain.stdout,
            "words": second.stderr.splitlines()[:1],
            **_figures(course),
        }


def _wait_for_plan(folder: Path) -> None:
    """The first run may end before its planner does."""
    ends = time.monotonic() + _PLANNED_S
    while time.monotonic() < ends and not list((folder / ".memopt").glob("[!.]*.plan.json*")):
        time.sleep(0.1)


def _figures(course: dict[str, Any]) -> dict[str, Any]:
    outcome = course["outcome"]
    if outcome is None or not course["from_cache"]:
        return {"problem": course["problem"] or "no plan was there for the second run"}
    measured = outcome["measured_peak_bytes"]
    return {
        "plain": outcome["unplanned_peak_bytes"],
        "predicted": outcome["predicted_peak_bytes"],
        "measured": measured,
        "held": measured is not None and measured <= outcome["budget_bytes"],
        "step": outcome["predicted_step_ms"] / max(1e-9, outcome["plain_step_ms"]) - 1,
    }


def main() -> None:
    """Print one line a script and the share of those that were held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS, "gan"])
    parser.add_argument("--optimizers", nargs="*", default=[*OPTIMIZERS])
    parser.add_argument("--sizes", nargs="*", default=[*SIZES])
    parser.add_argument("--budgets", nargs="*", default=["60%"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--time-limit", type=float, default=4.0)
    args = parser.parse_args()
    print(
        f"{'script':<34}{'budget':>7}{'plain':>9}{'foretold':>9}{'measured':>9}{'held':>6}{'step':>8}  same"
    )
    held = same = count = 0
    for kind in args.kinds:
        for optimizer in args.optimizers:
            for size in args.sizes:
                for budget in args.budgets:
                    found = one(kind, optimizer, size, budget, args)
                    count, held, same = (
                        count + 1,
                        held + bool(found.get("held")),
                        same + bool(found.get("same")),
                    )
                    print(line(f"{kind} {optimizer} {size}", budget, found), flush=True)
    print(f"held {held} of {count}, same bits {same} of {count}")


def line(name: str, budget: str, found: dict[str, Any]) -> str:
    """One script's line of the table."""
    if "problem" in found:
        return f"{name:<34}{budget:>7}  {found['problem']}"
    mib = [
        f"{found[key] / 2**20:>8.1f}M" if found[key] else f"{'-':>9}"
        for key in ("plain", "predicted", "measured")
    ]
    why = "" if found["held"] else "  " + re.sub(r"^memopt: ", "", " ".join(found["words"]))[:160]
    return (
        f"{name:<34}{budget:>7}{''.join(mib)}{'yes' if found['held'] else 'no':>6}{found['step']:>+8.1%}"
        f"  {'yes' if found['same'] else 'NO'}{why}"
    )


if __name__ == "__main__":
    main()
