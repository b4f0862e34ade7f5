"""Random orders of the streams under random plans on the late device (`tests/late/late_device.py`): how many, and whether any shows a race.

python -m benchmarks.late_schedules [--plans 30] [--orders 1000] [--processes 2]
python -m benchmarks.late_schedules --sessions 3   the examples under as many random plans each
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.late.late_training import random_layers, training
from tests.late.test_late_sessions import same_bits
from tests.late.test_late_tiers import plans
from tests.memopt.test_examples import EXAMPLES


def one_plan(plan: int, orders: int) -> dict[str, object]:
    """What came of `orders` steps of a plan, each in another order. Raises where one shows a race or other bytes."""
    begin = time.perf_counter()
    layers = random_layers(plan)
    with tempfile.TemporaryDirectory() as folder, training(layers, Path(folder)) as steps:
        for order in range(orders):
            try:
                steps.step(plan * 1_000_003 + order)
            except BaseException as error:  # a race among them
                error.add_note(f"plan {plan}, order {order}: {layers}")
                raise
        queued = sum(stream.clock[stream.number] for stream in steps.world.streams)
    return {
        "plan": plan,
        "devices": len(steps.devices),
        "tiers": sorted({layer.tier for layer in layers if layer.tier}),
        "swapped": steps.swapped_out,
        "queued": queued,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def sessions(plans_each: int) -> None:
    """Each example plain and under random plans, bit for bit. Raises where they differ."""
    for script in EXAMPLES:
        for seed in range(plans_each):
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                swaps = same_bits(script, Path(folder), seed)
            seconds = round(time.perf_counter() - begin, 1)
            print(json.dumps({"example": script.stem, "seed": seed, "swaps": swaps, "seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--orders", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--sessions", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    if options.sessions:
        sessions(options.sessions)
        return
    numbers = plans(options.plans)
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(pool.map(one_plan, numbers, [options.orders] * len(numbers)))
    for row in rows:
        print(json.dumps(row))
    print(
        json.dumps(
            {
                "orders": options.orders * len(rows),
                "swapped": sum(int(str(row["swapped"])) for row in rows),
                "queued": sum(int(str(row["queued"])) for row in rows),
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
