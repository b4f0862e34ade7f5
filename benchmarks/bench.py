"""Models x budgets through the commands a person would type: predicted and measured peak, step time, equality.

    make bench                                                   # all models at 100, 80, 60 and 45 % of the unplanned peak
    python -m benchmarks.bench --models resnet50 gpt2 --budgets 60% --pairs 3

Every figure is of whole runs of `benchmarks/train.py` in processes of their own. Times are medians of the steps after the
first two; plain and planned runs take turns, each first in every other pair, and the overhead is the median over pairs. `same`
compares every loss, and all parameters and buffers at the end, to the last bit. `set` is the largest resident set of the process,
everything included. The peak is measured in a run of its own, since measuring takes time and memory too. At 100 % the plan is empty:
what the hooks alone cost. After budgets that no plan meets comes a line at the least one that `advise` names. The last line of a
model is what `torch.utils.checkpoint` around every block comes to.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.models import MODELS, SCALES

ROOT = Path(__file__).parent.parent
MEMOPT = [sys.executable, "-m", "memopt"]
WARMUP = 2


class Run(NamedTuple):
    """One run of the training script."""

    results: list[str]
    step_ms: float
    set_bytes: int


class Failed(Exception):
    """A command ended with another code than 0; the text is what it said."""


def execute(command: list[str], folder: Path) -> tuple[str, int]:
    """Standard output of `command` and its largest resident set. Raises `Failed`."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise Failed(err.read().strip().splitlines()[-3:])
        return out.read(), usage.ru_maxrss * 1024


def train(command: list[str], folder: Path) -> Run:
    """Run a training command and read the losses and times that it prints."""
    output, set_bytes = execute(command, folder)
    steps = re.findall(r"^step \d+ loss \S+ (\S+) (\S+) s$", output, re.MULTILINE)
    times = [float(seconds) * 1000 for _, seconds in steps[WARMUP:]]
    digests = re.findall(r"^parameters and buffers (\S+)$", output, re.MULTILINE)
    return Run([*(loss for loss, _ in steps), *digests], statistics.median(times), set_bytes)


def train_in_turn(first: list[str], second: list[str], pairs: int, folder: Path) -> list[tuple[Run, Run]]:
    """`pairs` runs of either command, each command first in every other pair."""
    found = []
    for number in range(pairs):
        if number % 2:
            late = train(second, folder)
            found.append((train(first, folder), late))
        else:
            found.append((train(first, folder), train(second, folder)))
    return found


def profile(script: list[str], folder: Path, name: str) -> dict[str, object]:
    """Record the script to `name` in `folder`; what `memopt show --json` says of it."""
    execute([*MEMOPT, "profile", "-q", "-f", "-o", name, *script], folder)
    summary: dict[str, object] = json.loads(execute([*MEMOPT, "show", "--json", name], folder)[0])
    return summary


def bench_model(name: str, args: argparse.Namespace, folder: Path) -> None:
    """Print the table's lines for one model."""
    script = [str(ROOT / "benchmarks" / "train.py"), name, "--scale", args.scale, "--steps", str(args.steps)]
    script += ["--optimizer", args.optimizer]
    summary = profile(script, folder, "profile.json.gz")
    peak_bytes = int(str(summary["peak_bytes"]))
    refused = ""
    for budget in args.budgets:
        try:
            print(line_of_budget(name, budget, script, args, folder), flush=True)
        except Failed as failure:
            print(f"{name:<13}{budget:>6}  {failure}", flush=True)
            refused = str(failure)
    if least := re.search(r"a budget of at least ([\d.]+) (\w+)", refused):
        print(line_of_budget(name, "".join(least.groups()), script, args, folder), flush=True)
    by_hand = [*script, "--checkpoint"]
    hand_bytes = int(str(profile(by_hand, folder, "hand.json.gz")["peak_bytes"]))
    pairs = train_in_turn([sys.executable, *script], [sys.executable, *by_hand], args.pairs, folder)
    print(
        f"{name:<13}{'hand':>6}{mib(peak_bytes):>9}{'':>9}{'':>9}{mib(hand_bytes):>9}{hand_bytes / peak_bytes:>7.1%}"
        f"{mib(pairs[0][0].set_bytes):>9}{mib(pairs[0][1].set_bytes):>9}"
        f"{pairs[0][0].step_ms:>9.0f}{'':>9}{overhead(pairs):>+8.1%}  {same(pairs)}",
        flush=True,
    )


def line_of_budget(name: str, budget: str, script: list[str], args: argparse.Namespace, folder: Path) -> str:
    begin = time.perf_counter()
    allow = ["--allow", args.allow] if args.allow else []
    execute(
        [*MEMOPT, "advise", "profile.json.gz", "--budget", budget, "-f", "-o", "plan.json", *allow], folder
    )
    advise_s = time.perf_counter() - begin
    execute([*MEMOPT, "apply", "plan.json", "--outcome", "outcome.json", "-f", "-q"], folder)
    planned = [*MEMOPT, "apply", "plan.json", "--no-measure"]
    pairs = train_in_turn([sys.executable, *script], planned, args.pairs, folder)
    outcome = json.loads((folder / "outcome.json").read_text())
    unplanned, measured = outcome["unplanned_peak_bytes"], outcome["measured_peak_bytes"]
    predicted_overhead = outcome["predicted_step_ms"] / outcome["plain_step_ms"] - 1
    return (
        f"{name:<13}{budget:>6}{mib(unplanned):>9}{mib(outcome['budget_bytes']):>9}{mib(outcome['predicted_peak_bytes']):>9}"
        f"{mib(measured):>9}{(measured or 0) / unplanned:>7.1%}{mib(pairs[0][0].set_bytes):>9}{mib(pairs[0][1].set_bytes):>9}"
        f"{pairs[0][0].step_ms:>9.0f}{predicted_overhead:>+9.1%}{overhead(pairs):>+8.1%}  {same(pairs):<5}{advise_s:>7.1f}"
    )


def overhead(pairs: list[tuple[Run, Run]]) -> float:
    """By how much the second run of a pair is slower, median over pairs."""
    return statistics.median(second.step_ms / first.step_ms for first, second in pairs) - 1


def same(pairs: list[tuple[Run, Run]]) -> str:
    """Whether all results of all runs are the same bits."""
    results = pairs[0][0].results
    return "yes" if all(run.results == results for pair in pairs for run in pair) else "NO"


def mib(amount: int | None) -> str:
    return "-" if amount is None else f"{amount / 2**20:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--budgets", nargs="+", default=["100%", "80%", "60%", "45%"])
    parser.add_argument("--scale", choices=SCALES, default="bench")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--allow", default="", help="kinds of actions, as in memopt advise")
    args = parser.parse_args()
    print(
        f"{'MiB, ms':<13}{'budget':>6}{'peak':>9}{'allowed':>9}{'predict':>9}{'measure':>9}{'':>7}"
        f"{'set':>9}{'set':>9}{'step':>9}{'predict':>9}{'slower':>8}  same  advise s"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            bench_model(name, args, Path(folder))


if __name__ == "__main__":
    main()
