"""Peak of tensor bytes in a real CPU run of a script, by torch.profiler's allocator events, kernels' own temporaries included.

python benchmarks/cpu_truth.py --steps 3 script.py [args]       prints one JSON object
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile


class Enough(BaseException):
    """Raised after the last step that is measured."""


def stop_after(steps: int) -> None:
    seen: dict[int, int] = {}

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        first = next(iter(seen), id(optimizer))
        seen[first] = seen.get(first, 0) + (id(optimizer) == first)
        if seen[first] >= steps:
            raise Enough

    register_optimizer_step_post_hook(count)


def memory_events(prof: profile) -> list[tuple[int, int]]:
    """`(time, bytes)` of every allocation (positive) and release (negative) in order."""
    results = prof.profiler.kineto_results  # type: ignore[union-attr]
    found = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    return sorted(found, key=lambda event: event[0])


def peak_of(events: list[tuple[int, int]]) -> int:
    live = peak = 0
    for _, size in events:
        live += size
        peak = max(peak, live)
    return peak


def run(argv: list[str], steps: int) -> int:
    """Peak bytes of the first `steps` optimizer steps of the script `argv`."""
    stop_after(steps)
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    main = type(sys)("__main__")
    main.__file__ = argv[0]
    sys.modules["__main__"] = main
    with open(argv[0], encoding="utf-8") as file:
        code = compile(file.read(), argv[0], "exec")
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with watched as prof, contextlib.suppress(Enough):
        exec(code, main.__dict__)
    return peak_of(memory_events(prof))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr
    peak = run(args.argv, args.steps)
    print(json.dumps({"peak_bytes": peak, "torch": torch.__version__}), file=out)


if __name__ == "__main__":
    main()
