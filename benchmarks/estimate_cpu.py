"""Benchmark 5 of `memopt estimate`: the peak of a CPU run from fake tensors against the measured one, for every model here.

    python -m benchmarks.estimate_cpu [--scale tiny|bench] [--optimizer sgd|adamw] [--models gpt2,vit]

Measured: torch.profiler's allocator events of three steps (`cpu_truth.py`). Also, from a profile of the run at half the batch:
the peak at the full batch, scaled and re-traced.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.models import MODELS, SCALES
from memopt.estimators.elsewhere.from_profile import estimate_trace
from memopt.estimators.estimate import estimate_script
from memopt.trace import load_trace

HERE = Path(__file__).resolve().parent

STEPS = 3
MEDIAN, WORST = 0.01, 0.03


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default="bench")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument(
        "--profiles", action="store_true", help="also estimate from a profile at half the batch"
    )
    args = parser.parse_args()
    errors = []
    print(f"{'model':14} {'measured':>15} {'estimated':>15} {'error':>8}")
    for model in args.models.split(","):
        command = [str(HERE / "train.py"), model, "--scale", args.scale, "--optimizer", args.optimizer]
        command += ["--device", "cpu", "--steps", str(STEPS)]
        measured = measure(command)
        found = estimate_script(command, device="cpu", steps=STEPS).allocated_bytes
        errors.append(abs(found / measured - 1))
        print(f"{model:14} {measured:15,} {found:15,} {found / measured - 1:+8.2%}", flush=True)
        for line in from_profile(command) if args.profiles else ():
            print(line, flush=True)
    median, worst = statistics.median(errors), max(errors)
    print(f"median {median:.2%} (to reach: {MEDIAN:.0%}), worst {worst:.2%} (to reach: {WORST:.0%})")
    return 0 if median <= MEDIAN and worst <= WORST else 1


def measure(command: list[str]) -> int:
    """Peak bytes of a real run of the script."""
    done = run([str(HERE / "cpu_truth.py"), "--steps", str(STEPS), *command])
    return int(json.loads(done.splitlines()[-1])["peak_bytes"])


def from_profile(command: list[str]) -> Iterator[str]:
    """From a profile at batch 2 to batch 4, which is profiled too."""
    with tempfile.TemporaryDirectory() as folder:
        traces = []
        for batch in ("2", "4"):
            path = Path(folder, f"{batch}.profile.json.gz")
            words = [*command, "--batch", batch]
            words[words.index("--steps") + 1] = "5"  # two to warm up, one to record
            run(["-m", "memopt", "profile", "-q", "-o", str(path), *words])
            traces.append(load_trace(path))
        for method in ("scale", "retrace"):
            found = estimate_trace(traces[0], batch_size=4, method=method)  # type: ignore[arg-type]
            off = found.allocated_bytes / traces[1].peak_bytes - 1
            yield f"  {method} 2 to 4   {traces[1].peak_bytes:13,} {found.allocated_bytes:15,} {off:+8.2%}"


def run(words: list[str]) -> str:
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
