"""`python -m benchmarks.gpu`: see the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import benchmarks.gpu


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="train and measure here, on a GPU")
    record.add_argument("--out", type=Path, required=True, metavar="DIR")
    record.add_argument("--limit-s", type=float, default=540.0, help="start nothing new after so long (default: %(default)s)")  # fmt: skip
    record.add_argument("--run-limit-s", type=float, default=90.0, help="for one configuration (default: %(default)s)")  # fmt: skip
    record.add_argument("--jobs", type=int, default=1, help="at once: where the GPU has room for their sum (default: %(default)s)")  # fmt: skip
    compare = commands.add_parser("compare", help="estimate what was recorded, no GPU needed")
    compare.add_argument("folder", type=Path, metavar="DIR")
    listing = commands.add_parser("list", help="the configurations")
    for each in (record, compare, listing):
        each.add_argument("--only", nargs="*", default=[], metavar="WORD", help="configurations with one of these words in their name")  # fmt: skip
    args = parser.parse_args()
    if args.command == "compare":
        from benchmarks.gpu.compare import compare as compare_runs

        return int(compare_runs(args.folder, args.only) > 0)
    from benchmarks.gpu.record import chosen
    from benchmarks.gpu.record import record as record_runs

    names = chosen(args.only)
    if args.command == "list":
        print("\n".join(names))
        return 0
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here to record on")
    return int(
        record_runs(args.out, names, limit_s=args.limit_s, run_limit_s=args.run_limit_s, at_once=args.jobs)
        > 0
    )


if __name__ == "__main__":
    sys.exit(main())
