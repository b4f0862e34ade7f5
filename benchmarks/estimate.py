"""Estimates against measurements: `python benchmarks/estimate.py cpu|cs336|xmem|size [--truth FOLDER]`.

cpu     every model of benchmarks/models at a scale: predicted peak of the CPU run against torch.profiler's
cs336   four training snapshots of Stanford's CS336 model on a GPU: allocated and reserved
xmem    xMem's convolutional rows: peak reserved plus one constant a GPU (kernels that load lazily)
size    a 7B and a 70B decoder: seconds and RAM
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from memopt.estimators.estimate import Estimate, estimate_script

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
KERNELS_MIB = {"NVIDIA GeForce RTX 3060": 18, "NVIDIA GeForce RTX 4060": 14}
"""groundtruth/README.md: what lazily loaded kernels add to the measured device memory. The 8 GB card of older rows: as the 4060."""
CS336 = (
    (["--context", "128"], 6701.1, 6900),
    (["--context", "256"], 8691.2, 8836),
    (["--context", "512", "--bf16"], 11858.5, 12074),
    (["--context", "1024", "--bf16"], 23092.2, 24012),
)


def tell(errors: list[float], what: str) -> None:
    under = sum(1 for error in errors if error < 0)
    sizes = sorted(abs(error) for error in errors)
    p95 = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    print(
        f"{what}: {len(errors)} rows, median {100 * statistics.median(sizes):.2f} %, p95 {100 * p95:.2f} %, worst {100 * sizes[-1]:.2f} %, {under} under"
    )


def cpu(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(HERE))
    from models import MODELS

    errors = []
    script = str(HERE / "train.py")
    for model in args.only or MODELS:
        for optimizer in ("sgd", "adamw"):
            argv = [script, model, "--scale", args.scale, "--optimizer", optimizer, "--device", "cpu"]
            found = estimate_script(argv, device="cpu")
            command = [sys.executable, str(HERE / "cpu_truth.py"), *argv]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            measured = json.loads(ran.stdout)["peak_bytes"]
            errors.append(found.allocated_bytes / measured - 1)
            print(f"{model:14s} {optimizer:6s} measured {measured:>12d} predicted {found.allocated_bytes:>12d} {100 * errors[-1]:+.3f} %", flush=True)  # fmt: skip
    tell(errors, "CPU runs")


def cs336(args: argparse.Namespace) -> None:
    allocated, reserved = [], []
    for words, truth_allocated, truth_reserved in CS336:
        found = estimate_script([str(HERE / "cs336.py"), *words], device="a100-80gb")
        allocated.append(found.allocated_bytes / MIB / truth_allocated - 1)
        reserved.append(found.reserved_bytes / MIB / truth_reserved - 1)
        print(f"{' '.join(words):22s} allocated {found.allocated_bytes / MIB:9.1f} of {truth_allocated} {100 * allocated[-1]:+.2f} %  reserved {found.reserved_bytes / MIB:8.0f} of {truth_reserved} {100 * reserved[-1]:+.2f} %", flush=True)  # fmt: skip
    tell(allocated, "allocated")
    tell(reserved, "reserved")


def xmem_rows(truth: Path) -> Iterator[dict[str, str]]:
    seen = set()
    with (truth / "xmem_runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["model"], row["optimizer"], row["batch_size"], row["gpu"], row["run_set"])
            if row["family"] == "cnn" and row["real_oom"] == "0" and key not in seen:
                seen.add(key)
                yield row


def xmem(args: argparse.Namespace) -> None:
    known: dict[tuple[str, ...], Estimate] = {}
    errors: list[float] = []
    stated: list[float] = []
    theirs: list[float] = []
    for row in xmem_rows(args.truth):
        if args.only and row["model"] not in args.only:
            continue
        mode = str(int(float(row["zero_grad_mode"] or 0)))
        device = "rtx-3060-12gb" if "3060" in row["gpu"] else "rtx-4060"
        key = (row["model"], row["optimizer"], row["batch_size"], mode, device)
        if key not in known:
            argv = [str(HERE / "xmem_train.py"), *key[:3], "--zero", mode]
            known[key] = estimate_script(argv, device=device)
        measured = float(row["measured_peak_mib"])
        predicted = known[key].reserved_bytes / MIB + KERNELS_MIB.get(row["gpu"], 14)
        errors.append(predicted / measured - 1)
        theirs.append(float(row["xmem_mib"]) / measured - 1)
        if row["zero_grad_mode"]:
            stated.append(errors[-1])
        print(f"{row['model']:15s}{row['optimizer']:8s}{row['batch_size']:>4s} {device:14s} measured {measured:8.0f} predicted {predicted:8.0f} {100 * errors[-1]:+6.1f} %  xMem {100 * theirs[-1]:+6.1f} %", flush=True)  # fmt: skip
    tell(errors, "peak reserved, all rows")
    if stated:
        tell(stated, "peak reserved, rows with a stated zero_grad mode")
    tell(theirs, "xMem on the same rows")


def size(args: argparse.Namespace) -> None:
    for words in (["--size", "7b"], ["--size", "70b"]):
        start = time.perf_counter()
        found = estimate_script([str(HERE / "decoder.py"), *words], device="h200")
        seconds = time.perf_counter() - start
        ram = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(
            f"{words[1]}: reserved {found.reserved_bytes / 2**30:.1f} GiB in {seconds:.1f} s, {ram / 2**30:.2f} GiB of RAM"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cpu", "cs336", "xmem", "size"))
    parser.add_argument("--truth", type=Path, default=Path(os.environ.get("MEMOPT_GROUNDTRUTH", HERE.parents[1] / "shared" / "groundtruth")))  # fmt: skip
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    {"cpu": cpu, "cs336": cs336, "xmem": xmem, "size": size}[args.what](args)


if __name__ == "__main__":
    main()
