"""The plan of `torch.distributed._tools`' SAC ILP for a benchmark model: which modules to checkpoint, and which ops in them to save.

    python -m benchmarks.sac_plan gpt2 --ratio 0.6 -o gpt2.sac.json       then train.py --peer sac:gpt2.sac.json

The tools do not run on a CPU as they are: both runtime estimators need CUDA (`_roofline_estimate` its device table, `_benchmark_estimate` its
events). Here each op is timed by the clock instead; estimators, memory tracker, `sac_milp` (PuLP with CBC) and the choice of ops in each
module are torch's own. They are given any module that is not a leaf. `--ratio` is of the baseline peak that the tools reckon themselves.
Needs pulp and pwlf. There is no solution below what the leaf modules outside of every unit hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import (
    aggregate_stats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from benchmarks.models import MODELS, SCALES, workload

RUNS = 3


class OpTimer:
    """Runs an op on fake tensors and tells its time on real ones, once for each op and shapes."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def __call__(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """Fake result and milliseconds."""
        kwargs = kwargs or {}
        key = f"{op} {tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, kwargs))}"
        if key not in self._known:
            self._known[key] = self._measure(op, args, kwargs)
        return op(*args, **kwargs), self._known[key]

    def _measure(self, op: Any, args: Any, kwargs: Any) -> float:
        with no_dispatch():
            args, kwargs = tree_map_only(Tensor, real, (args, kwargs))
            times = []
            for _ in range(RUNS):
                begin = time.perf_counter()
                op(*args, **kwargs)
                times.append(time.perf_counter() - begin)
        return min(times) * 1000


def real(fake: Tensor) -> Tensor:
    """A tensor of the same layout: ones, or zeros where it may be an index."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
    made = torch.full((max(count, 0),), int(fake.is_floating_point()), dtype=fake.dtype)
    return made.as_strided(fake.shape, fake.stride())


def plan(model_name: str, scale: str, ratio: float) -> dict[str, Any]:
    """Modules to checkpoint with their ops' decisions (1: save), and what the ILP predicts. Raises `SystemExit` without a solution."""
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    timer = OpTimer()
    task = workload(model_name, scale)
    with FakeTensorMode():
        model = task.build()
        inputs, targets = task.batch()
        tracker, runtimes, sac = MemTracker(), RuntimeEstimator(), SACEstimator()
        tracker.track_external(model)
        for estimate in (tracker, runtimes("operator-level-cost-model"), sac("operator-level-cost-model")):
            if estimate is runtimes:
                runtimes._estimate = timer
            if estimate is sac:
                sac._estimate_runtime = timer
            with estimate:
                loss = task.loss(model(inputs), targets)
                if estimate is not sac:
                    loss.backward()
            model.zero_grad()
    for order in (runtimes.mod_fw_pre_order, runtimes.mod_fw_post_order):
        order[:] = dict.fromkeys(
            order
        )  # parse_module_info has no room for a module that runs twice (ResNet's ReLU)
    graph = parse_module_info(aggregate_stats(model, tracker, runtimes, sac, torch.device("cpu")))
    baseline_bytes, _ = get_peak_memory_runtime_baseline(graph)
    discard, recompute_ms, peak_bytes = sac_milp(graph, ratio * baseline_bytes / 2**30)
    if peak_bytes < 0:
        raise SystemExit(f"sac_milp: no solution at {ratio:.0%} of {baseline_bytes} bytes")
    save = {}
    for name, share in discard.items():
        stats = sac.sac_mod_stats[name]
        found = get_optimal_checkpointing_policy_per_module(stats, 1 - share)
        # none fits where ops in place, which have to be saved, exceed the share: then save nothing, as checkpoint does
        save[module_name(model, name)] = found or [0] * len(stats.func_names)
    return {
        "baseline_bytes": baseline_bytes,
        "peak_bytes": peak_bytes,
        "recompute_ms": recompute_ms,
        "save": save,
    }


def module_name(model: nn.Module, tracked: str) -> str:
    """The name of a module in `model`; the trackers put the class of the root before it."""
    return tracked.removeprefix(type(model).__name__).removeprefix(".")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--scale", choices=SCALES, default="bench")
    parser.add_argument("--ratio", type=float, default=0.6)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    found = plan(args.model, args.scale, args.ratio)
    args.output.write_text(json.dumps(found))
    print(
        f"{args.model}: {len(found['save'])} modules, peak {found['peak_bytes'] / 2**20:.0f} of "
        f"{found['baseline_bytes'] / 2**20:.0f} MiB, {found['recompute_ms']} ms to recompute",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
