"""`python -m benchmarks.advise`: every graph strategy x graph x budget in one run, and the figures of the planner.

Every plan is judged by `tests/advisors/graphs/schedule_checker.py`, which shares no code with memopt. Options: `--graphs a,b` (of `tests.support.training_graphs.shapes`),
`--budgets 90,80,...,20`, `--strategies x,y`, `--gbps 25`, `--time-limit 20`, `--files graph.json profile.json.gz ...` for graphs and recorded
iterations of your own, such as those of `memopt profile benchmarks/train.py resnet50 --scale bench`. `bound` is the overhead that no plan
with the same link, or without one, can undercut. `benchmarks.advise_link` compares links, `benchmarks.advise_exact` optima, `benchmarks.advise_speed` sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec

from memopt.advisors.graphs.graph import Graph, decode_graph
from memopt.advisors.graphs.of_trace import graph_of
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.graphs.schedule import encode_schedule
from memopt.advisors.registry import graph_strategies
from memopt.errors import BudgetInfeasible, NotPossibleHere
from memopt.trace import load_trace
from tests.advisors.graphs.schedule_checker import check
from tests.support.training_graphs.shapes import GRAPHS

DEFAULT_GRAPHS = ("vgg16", "resnet50", "mobilenet", "unet", "densenet121", "transformer12", "lstm60")
Point = tuple[str, int]
bounds: dict[Point, float] = {}
"""What `auto` proved, by graph and budget."""


def main() -> None:
    """Run the grid and print it."""
    options = arguments()
    names = options.strategies.split(",") if options.strategies else list(graph_strategies())
    if not options.gbps:
        names = [name for name in names if name in RECOMPUTE_ONLY or options.strategies]
    overheads: dict[Point, dict[str, float]] = {}
    print(
        f"{'graph':>14s} {'budget':>6s} "
        + " ".join(f"{name[:9]:>9s}" for name in names)
        + "     bound  seconds"
    )
    for title, data in sources(options):
        graph, plain = decode_graph(data, title), json.loads(data)
        peak = unplanned_peak(graph)
        for percent in (int(text) for text in options.budgets.split(",")):
            row: dict[str, float] = {}
            seconds = 0.0
            for name in names:
                begin = time.monotonic()
                row[name] = outcome(graph, plain, peak * percent // 100, name, options)
                if name == "auto":
                    seconds = time.monotonic() - begin
            overheads[title, percent] = row
            cells = " ".join(
                f"{row[name]:9.4f}" if math.isfinite(row[name]) else f"{'-':>9s}" for name in names
            )
            bound = bounds.get((graph.name, peak * percent // 100), 0.0)
            print(f"{title:>14s} {percent:5d}% {cells} {bound:9.4f}  {seconds:5.1f}", flush=True)
    summary(overheads)


RECOMPUTE_ONLY = {
    "auto", "dtr", "dtr-eqclass", "dtr-local", "msps", "lru", "size", "belady", "dtr-megengine", "next-use",
    "sublinear", "sublinear-greedy", "rotor", "checkmate", "superneurons", "capuchin",
}  # fmt: skip


def outcome(
    graph: Graph,
    plain: dict[str, Any],
    budget: int,
    name: str,
    options: argparse.Namespace,
) -> float:
    """Overhead by the independent checker; infinity where the strategy gives up."""
    try:
        schedule = plan_graph(
            graph,
            budget,
            strategy=name,
            out_gbps=options.gbps,
            in_gbps=options.gbps,
            time_limit_s=options.time_limit,
        )
    except (BudgetInfeasible, NotPossibleHere):
        return math.inf
    found: float = check(plain, json.loads(encode_schedule(schedule, graph)))["overhead"]
    if name == "auto":
        bounds[graph.name, budget] = schedule.overhead_bound
    return found


def summary(overheads: dict[Point, dict[str, float]]) -> None:
    """`auto` against the best other and against plain DTR."""
    worse = lost = better = tight = 0
    cuts: list[float] = []
    against_dtr: list[float] = []
    for (_, percent), row in overheads.items():
        if "auto" not in row:
            return
        others = [value for name, value in row.items() if name != "auto"]
        best = min(others, default=math.inf)
        if not math.isfinite(best):
            continue
        lost += not math.isfinite(row["auto"])
        worse += row["auto"] > best + 1e-4
        if percent <= 50 and best > 0:
            tight += 1
            better += row["auto"] < best - 1e-4
            cuts.append(1 - row["auto"] / best)
            if math.isfinite(row.get("dtr", math.inf)):
                against_dtr.append(1 - row["auto"] / row["dtr"])
    print(f"points where auto is infeasible and another is not: {lost}; worse than the best other: {worse}")
    if tight:
        print(
            f"at <= 50 %: strictly better at {better}/{tight}; mean cut of overhead vs the best other {mean(cuts):.1%}"
        )
    if against_dtr:
        print(
            f"mean cut vs plain DTR where it is feasible: {mean(against_dtr):.1%} over {len(against_dtr)} points"
        )


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def sources(options: argparse.Namespace) -> list[tuple[str, bytes]]:
    """Name and JSON text of each graph."""
    if options.files:
        return [(Path(path).name.split(".")[0], graph_text(Path(path))) for path in options.files]
    return [(name, msgspec.json.encode(GRAPHS[name]())) for name in options.graphs.split(",")]


def graph_text(path: Path) -> bytes:
    """A graph file as it is; the graph of a profile."""
    if path.suffix != ".gz":
        return path.read_bytes()
    return msgspec.json.encode(graph_of(load_trace(path), path.name.split(".")[0]))


def arguments() -> argparse.Namespace:
    """The command line; `make bench-advise` passes the words of the other programs too, which are not ours."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--graphs", default=",".join(DEFAULT_GRAPHS))
    parser.add_argument("--budgets", default="90,80,70,60,50,40,30,20")
    parser.add_argument("--strategies", default="")
    parser.add_argument("--gbps", type=float, default=0.0)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--files", nargs="*")
    return parser.parse_known_args()[0]


def parse_planning(parser: argparse.ArgumentParser, prove_s: float) -> argparse.Namespace:
    """The command line of a program that plans and proves; with `--cpu-time` the planner's clock is the processor's, for a busy machine."""
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--prove", type=float, default=prove_s)
    parser.add_argument("--cpu-time", action="store_true")
    options, _ = parser.parse_known_args()  # make bench-advise gives all benchmarks the same ARGS
    if options.cpu_time:
        time.monotonic = time.process_time
    return options


if __name__ == "__main__":
    main()
