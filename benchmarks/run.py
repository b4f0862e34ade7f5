"""`memopt run` on scripts of many kinds: is a budget planned for and held, are the results the same, what does it cost?

    make bench-run                                                    # all kinds, optimizers and sizes at 60 % of the plain peak
    make bench-run ARGS="--kinds language lora --budgets 60% 45%"
    make bench-run ARGS="--scripts mine/*.py --results mine.jsonl"    # scripts of one's own, in place of these
    make bench-run ARGS="--kinds examples models --bytes --budgets 60% floor+5%"

`--bytes`: each script is profiled first, and the budget given to `memopt run` in bytes, as people do; so it holds from the first iteration on,
before any plan is there. `floor`: the smallest peak that `memopt advise --budget min` finds.

Each script runs three times in processes of its own: plain; under `memopt run`, where it is recorded and its plan is made; and again,
enforced from the first iteration on. `held`: the measured peak of every enforced iteration, of both runs, is within the budget. `same`: both runs print what the
plain one does, losses, parameters, buffers and optimizer state to the last bit (times left out). `before`: what the iterations before the
plan took beyond plain ones, in plain steps, the first left out. Where the budget is not met, what holds the floor.
What was found last: `run_results.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import EXAMPLES
from benchmarks.models import MODELS
from benchmarks.run_scripts import KINDS, OPTIMIZERS, SIZES
from memopt.plan import load_plan
from memopt.trace import load_trace
from memopt.units import parse_bytes

ROOT = Path(__file__).parent.parent
_PLANNED_S = 120.0


def execute(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    }
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def one(script: list[str], budget: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one script three times."""
    memopt = [sys.executable, "-m", "memopt"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = execute([sys.executable, *script], folder)
        if plain.returncode:
            return {"problem": plain.stderr.strip()[-200:]}
        if args.bytes:
            budget = _in_bytes(memopt, script, budget, folder)
        run = [*memopt, "run", "--budget", budget, "--time-limit", str(args.time_limit)]
        first = execute([*run, "--outcome", "first.json", *script], folder)
        _wait_for_plan(folder)
        second = execute([*run, "--outcome", "second.json", *script], folder)
        try:
            courses = [json.loads((folder / f"{each}.json").read_text()) for each in ("first", "second")]
        except OSError:
            return {"problem": f"no outcome: {first.stderr.strip()[-300:]} {second.stderr.strip()[-300:]}"}
        return {
            "same": _untimed(first.stdout) == _untimed(second.stdout) == _untimed(plain.stdout),
            "words": second.stderr.splitlines(),
            "first_words": first.stderr.splitlines(),
            **_figures(*courses),
        }


def _in_bytes(memopt: list[str], script: list[str], budget: str, folder: Path) -> str:
    """A share of the plain peak, or of the smallest that `advise` finds, as a number of bytes."""
    execute([*memopt, "profile", "-q", "-o", "profile.json", *script], folder)
    if not budget.startswith("floor"):
        return str(parse_bytes(budget, of_bytes=load_trace(folder / "profile.json").peak_bytes))
    execute([*memopt, "advise", "profile.json", "--budget", "min", "-o", "min.json"], folder)
    floor, more = (
        load_plan(folder / "min.json").predicted_peak_bytes,
        budget.removeprefix("floor").strip("+%"),
    )
    return str(int(floor * (1 + float(more or 0) / 100)))


def _untimed(text: str) -> str:
    """Without the times that a script prints."""
    return re.sub(r"\d+\.\d+ (s|ms)\b", "", text)


def _wait_for_plan(folder: Path) -> None:
    """The first run may end before its planner does."""
    ends = time.monotonic() + _PLANNED_S
    while time.monotonic() < ends and not list((folder / ".memopt").glob("[!.]*.plan.json*")):
        time.sleep(0.1)


def _figures(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    outcome = second["outcome"]
    if outcome is None:
        return {"problem": second["problem"] or "no plan was there for the second run"}
    peaks = [each["peak_bytes"] for each in (first, second)]
    guarded = [guard["most_bytes"] for guard in first["guards"]]
    measured = max((each for each in peaks if each is not None), default=None)
    most = max((measured or 0, *guarded))
    return {
        "plain": outcome["unplanned_peak_bytes"],
        "predicted": outcome["predicted_peak_bytes"],
        "measured": measured,
        "budget": outcome["budget_bytes"],
        "guarded": max(guarded, default=None),
        "held": measured is not None and most <= outcome["budget_bytes"],
        "from_cache": second["from_cache"],
        "before": _before(first, outcome["plain_step_ms"]),
        "step": outcome["predicted_step_ms"] / max(1e-9, outcome["plain_step_ms"]) - 1,
    }


def _before(first: dict[str, Any], plain_ms: float) -> float | None:
    """What came before the plan, beyond plain steps, in plain steps."""
    count = first["enforced_after"]
    if not count:
        return None
    spent = first["spent_ms"] + sum(first["times_ms"][1:count]) - (count - 1) * plain_ms
    return float(spent / max(1e-9, plain_ms))


def main() -> None:
    """Print one line a script and the share of those that were held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS, "gan"])
    parser.add_argument("--optimizers", nargs="*", default=[*OPTIMIZERS])
    parser.add_argument("--sizes", nargs="*", default=[*SIZES])
    parser.add_argument("--scripts", nargs="*", type=Path, default=[], help="run these")
    parser.add_argument("--budgets", nargs="*", default=["60%"])
    parser.add_argument("--bytes", action="store_true", help="give the budget in bytes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--time-limit", type=float, default=4.0)
    parser.add_argument(
        "--results", type=Path, help="JSON lines, added to; a script found in it is not run again"
    )
    args = parser.parse_args()
    print(
        f"{'script':<34}{'budget':>7}{'plain':>9}{'foretold':>9}{'guarded':>9}{'measured':>9}{'held':>6}{'step':>8}{'before':>8}  same"
    )
    known = _known(args.results)
    all_found = []
    for (name, script), budget in itertools.product(_scripts(args), args.budgets):
        key = f"{name} {budget}"
        found = known.get(key) or one(script, budget, args)
        if args.results and key not in known:
            with args.results.open("a") as file:
                file.write(json.dumps({"script": key, **found}) + "\n")
        all_found.append(found)
        print(line(name, budget, found), flush=True)
    held, same = (sum(bool(found.get(key)) for found in all_found) for key in ("held", "same"))
    print(f"held {held} of {len(all_found)}, same bits {same} of {len(all_found)}")


def _scripts(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """(name, what python is given)."""
    if args.scripts:
        return [(each.stem, [str(each.resolve())]) for each in args.scripts]
    steps = ["--steps", str(args.steps)]
    whole = {
        "examples": {each: [str(ROOT / "examples" / f"{each}.py")] for each in EXAMPLES},
        "models": {each: [str(ROOT / "benchmarks" / "train.py"), each] for each in MODELS},
    }
    found = [
        (f"{kind} {each}", [*script, *steps])
        for kind in whole
        if kind in args.kinds
        for each, script in whole[kind].items()
    ]
    kinds = [kind for kind in args.kinds if kind not in whole]
    for parts in itertools.product(kinds, args.optimizers, args.sizes):
        found.append((" ".join(parts), ["-m", "benchmarks.run_scripts", *parts, str(args.steps)]))
    return found


def _known(results: Path | None) -> dict[str, dict[str, Any]]:
    """What an earlier run has found, by the script's name and budget."""
    if results is None or not results.exists():
        return {}
    return {found["script"]: found for found in map(json.loads, results.read_text().splitlines())}


def line(name: str, budget: str, found: dict[str, Any]) -> str:
    """One script's line of the table."""
    if "problem" in found:
        return f"{name:<34}{budget:>7}  {found['problem']}"
    mib = [
        f"{found[key] / 2**20:>8.1f}M" if found.get(key) else f"{'-':>9}"
        for key in ("plain", "predicted", "guarded", "measured")
    ]
    before = "-" if found.get("before") is None else f"{found['before']:.1f}"
    why = "" if found["held"] else "  " + re.sub(r"^memopt: ", "", " ".join(found["words"][:1]))[:160]
    return (
        f"{name:<34}{budget:>7}{''.join(mib)}{'yes' if found['held'] else 'no':>6}{found['step']:>+8.1%}"
        f"{before:>8}  {'yes' if found['same'] else 'NO'}{why}"
    )


if __name__ == "__main__":
    main()
