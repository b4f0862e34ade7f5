"""Half an hour on a GPU, used well: jobs with time limits, most valuable first, one line of JSON each.

    python -m benchmarks.gpu.campaign correctness --out DIR         does everything work there, with the same bits?
    python -m benchmarks.gpu.campaign runs --out DIR                `memopt run`: the same output, within the budget?
    python -m benchmarks.gpu.campaign headline --out DIR            memopt beside its peers: peak and step time
    python -m benchmarks.gpu.campaign workspaces --out DIR          what cuDNN and the driver take
    python -m benchmarks.gpu.campaign --list
    python -m benchmarks.gpu.campaign --dry-run                     every job of every part on a CPU, with tiny models

DIR gets `PART.jsonl` and, of jobs that failed, `PART.log`. A job that is in the file is not done again, so the same command goes on
where it ended; `data/` beside this file keeps what was found. A dry run needs no DIR, and ends when all jobs have. Ground truth for
estimates is recorded by `record`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import JOBS, Job, dry

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parts = list(dict.fromkeys(job.part for job in JOBS.values()))
    parser.add_argument("part", nargs="?", choices=parts)
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--limit-s", type=float, default=540.0, help="start nothing new after so long (default: %(default)s); a dry run has no limits")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=6, help="at once, of those that time nothing (default: %(default)s)")  # fmt: skip
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dry_run:
        os.environ["MEMOPT_CAMPAIGN_DRY"] = "1"
    if args.job:
        print(json.dumps(JOBS[args.job].run(), separators=(",", ":"), default=str), flush=True)
        return 0
    chosen = [
        job
        for job in JOBS.values()
        if args.part in (None, job.part) and (not args.only or any(word in job.name for word in args.only))
    ]
    if args.list or not (args.dry_run or (args.part and args.out)):
        for job in chosen:
            print(f"{job.part:14s} {job.limit_s:4.0f} s  {job.name}")
        return 0
    limit_s = math.inf if args.dry_run else args.limit_s
    with tempfile.TemporaryDirectory() as nowhere:
        folder = args.out or Path(nowhere)
        return sum(_campaign([job for job in chosen if job.part == part], part, folder, limit_s, args.jobs) for part in parts)  # fmt: skip


def _campaign(jobs: list[Job], part: str, folder: Path, limit_s: float, at_once: int) -> int:
    """Run `jobs`, those that are timed alone and after the others; how many failed."""
    if not jobs:
        return 0
    end = time.monotonic() + limit_s
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}.jsonl"
    done = {json.loads(line)["job"] for line in path.read_text().splitlines()} if path.exists() else set()
    missing = [job for job in jobs if job.name not in done]
    failed: list[str] = []

    def one(job: Job) -> None:
        left = end - time.monotonic()
        if left < min(15.0, job.limit_s):
            print(f"left out  {job.name}", flush=True)
            return
        begin = time.monotonic()
        found, log = _alone(job, left if dry() else min(job.limit_s, left))
        line = {"job": job.name, "seconds": round(time.monotonic() - begin, 1), **found}
        with path.open("a") as file:  # one write of one line: jobs that run at once do not mix
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        if "failed" in found:
            failed.append(job.name)
            with (folder / f"{part}.log").open("a") as file:
                file.write(f"\n##### {job.name}\n{log[-6000:]}\n")
        said = f"FAILED: {found['failed']}" if list(found) == ["failed"] else job.words(found)
        print(f"{line['seconds']:6.1f} s  {job.name}: {said}", flush=True)

    _each([job for job in missing if not job.timed], one, at_once)
    _each([job for job in missing if job.timed], one, 1)
    print(f"{len(failed)} of {len(missing)} failed: {', '.join(failed)}" if failed else "none failed")
    return len(failed)


def _each(jobs: list[Job], one: Callable[[Job], None], at_once: int) -> None:
    with ThreadPoolExecutor(max(1, at_once)) as pool:
        list(pool.map(one, jobs))


def _alone(job: Job, limit_s: float) -> tuple[dict[str, Any], str]:
    """What the job tells in its last line, in a process of its own; and all that it said."""
    command = [sys.executable, "-m", "benchmarks.gpu.campaign", "--job", job.name]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit_s if math.isfinite(limit_s) else None)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        return {"failed": f"not done in {limit_s:.0f} s"}, out + err
    if process.returncode != 0:
        lines = err.strip().splitlines()
        return {"failed": lines[-1] if lines else f"ended with {process.returncode}"}, out + err
    return dict(json.loads(out.strip().splitlines()[-1])), out + err


if __name__ == "__main__":
    sys.exit(main())
