"""`python -m benchmarks.advise_exact`: `auto` against the optimum of recomputation, wherever HiGHS proves it.

Small graphs x budgets (`--shares`: per cent of the way from the floor to the unplanned peak), each planned by `auto` and by `checkmate` (the
integer program of the paper, `--prove` seconds of HiGHS). `bound` is the better of what HiGHS proves with that program and with
`graphs/bounds/exact.py`'s, `gap` what is left below the better plan; a point with at most 1 % counts as proven, and `off` is how many points of
overhead `auto` is above that plan. Judged by `tests/advisors/graphs/schedule_checker.py`. Options: `--graphs a,b`, `--time-limit 20`, `--cpu-time`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable

import msgspec

from benchmarks.advise import parse_planning
from memopt.advisors.graphs.bounds.exact import Relaxed, prove
from memopt.advisors.graphs.graph import GraphFile, decode_graph
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import floor_bytes
from memopt.advisors.graphs.schedule import encode_schedule
from memopt.errors import BudgetInfeasible, NotPossibleHere
from tests.advisors.graphs.schedule_checker import check
from tests.support.training_graphs.families import accumulation, branches, chain, experts, random_dag
from tests.support.training_graphs.shapes import lstm, mobilenet, transformer, unet, vgg

GAP = 0.01
SMALL: dict[str, Callable[[], GraphFile]] = {
    "chain5": lambda: chain(5, 1),
    "chain10": lambda: chain(10, 1),
    "random25": lambda: random_dag(25, 1),
    "random40": lambda: random_dag(40, 2),
    "random60": lambda: random_dag(60, 1),
    "transformer1": lambda: transformer(8, 512, 768, 1),
    "lstm2": lambda: lstm(256, 1024, 2, 1),
    "vgg16": vgg,
    "branches3": lambda: branches(3, 1, 2),
    "experts1": lambda: experts(1, 3),
    "accumulation2": lambda: accumulation(2, 5),
    "mobilenet": mobilenet,
    "unet": unet,
}


def main() -> None:
    """Run the grid and print it."""
    options = arguments()
    distances: list[float] = []
    print(f"{'graph':>14s}   ops  share checkmate      auto     bound    gap     off")
    for name in options.graphs.split(","):
        data = msgspec.json.encode(SMALL[name]())
        graph, plain = decode_graph(data, name), json.loads(data)
        floor, _ = floor_bytes(graph, swap=False)
        for share in (int(text) for text in options.shares.split(",")):
            budget = floor + (unplanned_peak(graph) - floor) * share // 100
            overheads: dict[str, float] = {}
            bound = 0.0
            for strategy, limit_s in (("auto", options.time_limit), ("checkmate", options.prove)):
                try:
                    schedule = plan_graph(graph, budget, strategy=strategy, time_limit_s=limit_s)
                except (BudgetInfeasible, NotPossibleHere):
                    overheads[strategy] = math.inf
                    continue
                found = check(plain, json.loads(encode_schedule(schedule, graph)))
                overheads[strategy] = found["overhead"]
                bound = max(bound, schedule.overhead_bound)
            best = min(overheads.values())
            if best < math.inf:
                problem = GraphProblem(graph=graph, budget_bytes=budget)
                bound = max(bound, prove(problem, options.prove, Relaxed).bound_ms / graph.plain_ms)
            gap = (best - bound) / best if 0 < best < math.inf else 0.0
            off = 100 * (overheads["auto"] - best) if gap <= GAP and best < math.inf else math.nan
            if not math.isnan(off):
                distances.append(off)
            print(
                f"{name:>14s} {graph.op_count:5d} {share:5d}% {overheads['checkmate']:9.4f} {overheads['auto']:9.4f} {bound:9.4f} "
                f"{gap:6.1%} {off:7.3f}",
                flush=True,
            )
    if distances:
        print(
            f"proven within {GAP:.0%} at {len(distances)} points; auto is at most {max(distances):.3f} points of overhead above the optimum, "
            f"more than 0.5 at {sum(off > 0.5 for off in distances)}"
        )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", default=",".join(SMALL))
    parser.add_argument("--shares", default="80,60,40,20,5")
    return parse_planning(parser, prove_s=120.0)


if __name__ == "__main__":
    main()
